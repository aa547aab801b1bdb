"""Models, losses and optimizers that are trained on one device and on replicas."""

import copy
import dataclasses
from collections.abc import Callable

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import lr_scheduler

from tests.oracle import assert_same, assert_same_training, train, train_loop

REPLICAS = [1, 2, 3, 4]
WAYS = [1, 2, 3]
BATCH_SIZES = [10, 11, 7, 2, 1, 12, 3, 10, 5, 8, 11, 1, 4, 9, 10, 2, 7, 6, 13, 3]


class Classifier(nn.Module):
    """Gives logits from features; the layers in ``body`` are the thing under test."""

    def __init__(self, *body):
        super().__init__()
        self.body = nn.Sequential(*body)

    def forward(self, x):
        return self.body(x)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(6, 5, num_layers=2, batch_first=True)
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        output, (hidden, _) = self.lstm(x)
        assert hidden.shape[1] == x.shape[0]
        return self.head(output[:, -1])


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.encoder = nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, batch_first=True)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.head(self.encoder(x).mean(1))


class Tied(nn.Module):
    """A tiny language model; its output layer shares the embedding's weight."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.mix = nn.Linear(6, 6)
        self.out = nn.Linear(6, 7, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, tokens):
        return self.out(torch.tanh(self.mix(self.embed(tokens))))


class PartlyTrained(nn.Module):
    """One frozen layer, one parameter that no forward uses, one plain parameter."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(6, 6)
        self.frozen.requires_grad_(False)
        self.unused = nn.Parameter(torch.full((3,), 5.0))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.frozen(x)) * self.scale)


class Residual(nn.Module):
    """Convolutions with a GroupNorm and parameters in a ParameterList."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 4)
        self.gains = nn.ParameterList([torch.ones(4, 1, 1), torch.full((4, 1, 1), 0.5)])
        self.head = nn.Linear(4 * 6 * 6, 3)

    def forward(self, x):
        x = self.conv(x)
        for gain in self.gains:
            x = x + gain * torch.sigmoid(self.norm(x))
        return self.head(x.flatten(1))


def mlp():
    return Classifier(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def features(size, *shape):
    return lambda: (torch.randn(size, *shape), torch.randint(3, (size,)))


def tokens(size):
    return lambda: (torch.randint(7, (size, 4)), torch.randint(7, (size, 4)))


def cross_entropy(model, batch):
    x, y = batch
    logits = model(x)
    return F.cross_entropy(logits.flatten(0, -2), y.flatten())


def cross_entropy_with_l2(model, batch):
    return cross_entropy(model, batch) + 0.01 * sum((p**2).sum() for p in model.parameters())


def clip_norm(model):
    return clip_grad_norm_(model.parameters(), 0.05)


def clip_value(model):
    clip_grad_value_(model.parameters(), 0.01)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def two_groups(model):
    first, *rest = model.parameters()
    return torch.optim.SGD(
        [{"params": [first], "lr": 0.2, "weight_decay": 0.1}, {"params": rest}],
        lr=0.05,
        momentum=0.5,
    )


@dataclasses.dataclass(frozen=True)
class Case:
    build: Callable = mlp
    data: Callable = dataclasses.field(default=lambda size: features(size, 6))
    loss: Callable = cross_entropy
    optimizer: Callable = sgd
    scheduler: Callable | None = None
    clip: Callable | None = None


CASES = {
    "sgd-momentum": Case(),
    "adamw": Case(optimizer=adamw),
    "adafactor": Case(optimizer=lambda m: torch.optim.Adafactor(m.parameters(), lr=1e-2)),
    "foreach-adam": Case(
        optimizer=lambda m: torch.optim.Adam(m.parameters(), lr=1e-2, amsgrad=True, foreach=True)
    ),
    "foreach-sgd": Case(
        optimizer=lambda m: torch.optim.SGD(m.parameters(), 0.1, momentum=0.9, foreach=True)
    ),
    "parameter-groups": Case(optimizer=two_groups),
    "clipped-norm": Case(clip=clip_norm),
    "clipped-norm-adamw": Case(clip=clip_norm, optimizer=adamw),
    "clipped-value": Case(clip=clip_value),
    "l2-in-the-loss": Case(loss=cross_entropy_with_l2),
    "l2-in-the-loss-and-clipped": Case(loss=cross_entropy_with_l2, clip=clip_norm),
    "step-lr": Case(scheduler=lambda o: lr_scheduler.StepLR(o, 3, gamma=0.5)),
    "cosine": Case(
        optimizer=adamw, scheduler=lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=20)
    ),
    "one-cycle": Case(
        optimizer=adamw, scheduler=lambda o: lr_scheduler.OneCycleLR(o, 0.05, total_steps=20)
    ),
    "lstm": Case(build=Recurrent, data=lambda size: features(size, 4, 6)),
    "attention": Case(build=Attention, data=lambda size: features(size, 4, 6)),
    "tied-weights": Case(build=Tied, data=tokens),
    "tied-weights-adamw-clipped": Case(build=Tied, data=tokens, optimizer=adamw, clip=clip_norm),
    "frozen-and-unused": Case(build=PartlyTrained),
    "frozen-and-unused-adamw-clipped": Case(build=PartlyTrained, optimizer=adamw, clip=clip_norm),
    "convolution": Case(
        build=Residual,
        data=lambda size: features(size, 1, 6, 6),
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9),
    ),
}


def make_batches(case, sizes=BATCH_SIZES):
    return [case.data(size)() for size in sizes]


def prepared(case):
    """The plain model, an equal second one, and 20 batches."""
    plain = case.build()
    return plain, copy.deepcopy(plain), make_batches(case)


def compare(case, way, strategy, model, optimizer, plain, batches):
    """Trains both and compares all that training leaves."""
    plain_optimizer = case.optimizer(plain)
    options, plain_options = {"clip": case.clip}, {"clip": case.clip}
    if case.scheduler is not None:
        options["scheduler"] = case.scheduler(optimizer)
        plain_options["scheduler"] = case.scheduler(plain_optimizer)
    expected = train_loop(plain, plain_optimizer, batches, case.loss, **plain_options)
    actual = train(way, strategy, model, optimizer, batches, case.loss, **options)
    assert_same(actual, expected, "losses")
    assert_same_training(model, optimizer, plain, plain_optimizer)
