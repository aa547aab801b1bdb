"""Compiled steps and the plain loop: the same model, batches and optimizer for both."""

import torch
from torch import nn
from torch.nn import functional as F

import mirror


def mlp():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def linear():
    return nn.Sequential(nn.Linear(6, 3))


def batches(sizes, features=6, classes=3):
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(size, features, generator=generator),
            torch.randint(0, classes, (size,), generator=generator),
        )
        for size in sizes
    ]


def usual_step(model, optimizer):
    def step(x, y):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return step


def squared_step(model, optimizer):
    def step(x, y):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), F.one_hot(y, 3).float())
        loss.backward()
        optimizer.step()
        return loss

    return step


class Beside:
    """A plain loop, and the same one compiled on N simulated devices."""

    def __init__(
        self,
        num_replicas,
        make_model=mlp,
        make_optimizer=None,
        make_step=usual_step,
        *,
        mode="trace",
        **options,
    ):
        make_optimizer = make_optimizer or (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9))
        torch.manual_seed(0)
        self.plain = make_model()
        self.plain_optimizer = make_optimizer(self.plain.parameters())
        self.plain_step = make_step(self.plain, self.plain_optimizer)
        self.strategy = mirror.MirroredStrategy(["cpu"] * num_replicas)
        torch.manual_seed(0)
        with self.strategy.scope():
            self.model = make_model()
            self.optimizer = make_optimizer(self.model.parameters())
        self.step = make_step(self.model, self.optimizer)
        self.compiled = self.strategy.compile(self.step, mode=mode, **options)

    def train(self, data, between=lambda beside: None, rtol=1e-5, atol=1e-6):
        """Trains both, and compares losses and parameters after every step."""
        for batch, own in zip(data, self.strategy.distribute_dataset(data), strict=True):
            expected = self.plain_step(*batch)
            got = self.strategy.reduce("mean", self.compiled(*own))
            torch.testing.assert_close(got, expected.detach(), rtol=rtol, atol=atol)
            between(self)
        self.compare(rtol, atol)

    def compare(self, rtol=1e-5, atol=1e-6):
        self.strategy.check_replicas()
        theirs = dict(self.plain.named_parameters())
        for name, parameter in self.model.named_parameters():
            torch.testing.assert_close(
                parameter.detach(), theirs[name].detach(), rtol=rtol, atol=atol
            )
