"""Steps of a small net in run and outside, and the same on one device."""

import copy

import torch
from torch import nn

from tests.oracle import in_run

SIZE = 6


def net():
    return nn.Sequential(nn.Linear(SIZE, 4), nn.Tanh(), nn.Linear(4, 1))


def loss_of(model, batch):
    return (model(batch) - 1).square().mean()


def batches(count=4, size=7):
    return [torch.randn(size, SIZE) for _ in range(count)]


def pair(strategy, make_optimizer):
    """``(model, optimizer)`` on one device, and the same mirrored."""
    plain = net()
    model = strategy.mirror(copy.deepcopy(plain))
    return (plain, make_optimizer(plain.parameters())), (model, make_optimizer(model.parameters()))


def step_in_run(strategy, model, optimizer, batch):
    def step(x):
        optimizer.zero_grad()
        loss_of(model, x).backward()
        optimizer.step()

    in_run(strategy, step, batch)


def adam(params):
    return torch.optim.Adam(params, lr=0.05)


def momentum(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)
