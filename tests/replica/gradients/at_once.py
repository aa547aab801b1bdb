"""Models that record the threads of their backward passes, and comparisons of gradients."""

import copy
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.oracle import assert_same


class Watched(nn.Module):
    """A model that records the thread of its hidden activation's gradient."""

    def __init__(self, *body):
        super().__init__()
        self.body = nn.Sequential(*body)
        self.head = nn.LazyLinear(3)
        self.threads = []

    def forward(self, x):
        hidden = self.body(x)
        if hidden.requires_grad:
            hidden.register_hook(self.record_thread)
        return self.head(hidden.flatten(1))

    def record_thread(self, grad):
        self.threads.append(threading.get_ident())

    def ran_at_once(self):
        """Whether the last pass went through every replica in a thread of its own."""
        threads, self.threads = self.threads, []
        return len(set(threads)) == len(threads) > 1


def small(*body):
    torch.manual_seed(0)
    model = Watched(*(body or (nn.Linear(6, 5), nn.Tanh())))
    model(torch.zeros(2, 6))
    model.threads.clear()
    return model


def mirrored(strategy, *body):
    return strategy.mirror(small(*body))


def grads_of(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def with_same_gradients(strategy, plain, loss):
    """Returns a mirrored copy of a module; a backward pass has left both the same gradients."""
    model = strategy.mirror(copy.deepcopy(plain))
    for m in (model, plain):
        loss(m).backward()
    assert_same(grads_of(model), grads_of(plain))
    return model


def assert_equal_bits(actual, expected):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name


def batch_of(size=10, *shape):
    return torch.randn(size, *(shape or (6,))), torch.arange(size) % 3


def loss_of(strategy, model, batch, way):
    """Returns the loss of a batch: its forward split by the call, or in run."""
    x, y = batch
    if way == 1:
        return F.cross_entropy(model(x), y)
    (parts,) = strategy.distribute_dataset([(x, y)])
    losses = strategy.run(lambda part: F.cross_entropy(model(part[0]), part[1]), args=(parts,))
    return strategy.reduce("mean", losses)


ways = pytest.mark.parametrize("way", [1, 2])
