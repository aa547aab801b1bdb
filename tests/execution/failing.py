"""Runs that fail, after which the strategy stays usable; and a model with dropout."""

import copy

import torch
from torch import nn

import mirror
from tests.oracle import assert_same, finishes

N = 4


class Boom(Exception):
    pass


def replica():
    context = mirror.get_replica_context()
    return context, context.replica_id_in_sync_group


def works(strategy):
    """One step of a small model is right on all replicas."""
    plain = nn.Linear(3, 2)
    model = strategy.mirror(copy.deepcopy(plain))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (plain, model)]
    x = torch.randn(10, 3)

    def step(part):
        assert torch.is_grad_enabled()
        optimizers[1].zero_grad()
        model(part).square().mean().backward()
        optimizers[1].step()
        return mirror.get_replica_context().all_reduce("sum", torch.ones(2))

    def use():
        (batch,) = strategy.distribute_dataset([x])
        sums = strategy.local_results(strategy.run(step, args=(batch,)))
        assert len(sums) == strategy.num_replicas_in_sync
        assert all(torch.equal(s, torch.full((2,), float(len(sums)))) for s in sums)
        model(x).square().mean().backward()
        strategy.check_replicas()

    _, error, _ = finishes(use)
    if error is not None:
        raise error
    optimizers[0].zero_grad()
    plain(x).square().mean().backward()
    optimizers[0].step()
    plain(x).square().mean().backward()
    assert_same(model.state_dict(), plain.state_dict())
    assert_same(model.weight.grad, plain.weight.grad)


def error_of(strategy, fn, *args):
    """What ``run`` raises; it must not wait, and the strategy must stay usable."""
    _, error, _ = finishes(lambda: strategy.run(fn, args=args))
    assert error is not None, "no error"
    works(strategy)
    return error


def text_of(error):
    return "\n".join([str(error), *getattr(error, "__notes__", [])])


def trained_pair(strategy):
    plain = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    model = strategy.mirror(copy.deepcopy(plain))
    return plain, model, torch.randn(8, 4)


def loss_of(model, x):
    return model(x).square().mean()


# A model with dropout, and the masks that it drew


class Drops(nn.Module):
    """Dropout on a vector of ones: the output is the mask."""

    def __init__(self, p=0.5):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(64))
        self.drop = nn.Dropout(p)

    def forward(self, x):
        return self.drop(x * self.scale)


def masks(model, rows=12):
    return model(torch.ones(rows, 64)).detach()


def masks_in_run(strategy, model, rows=3):
    result = strategy.run(lambda: model(torch.ones(rows, 64)).detach())
    return torch.stack(strategy.local_results(result))


def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
