"""Values that each replica sees after a change outside run."""

import torch
from torch import nn

from tests.oracle import assert_same

N = 3


class Net(nn.Module):
    """Linear, BatchNorm and a buffer of its own; small values, so that changes stand out."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("shift", torch.zeros(2))

    def forward(self, x):
        return self.norm(self.linear(x) + self.shift)


def values_seen(strategy, read):
    """What ``read()`` gives on each replica; tensors are copied."""

    def fn():
        value = read()
        return value.detach().clone() if isinstance(value, torch.Tensor) else value

    return strategy.local_results(strategy.run(fn))


def assert_all_see(strategy, read, expected):
    for r, value in enumerate(values_seen(strategy, read)):
        assert_same(value, expected, f"replica {r}", tolerance=0)
    assert_same(read(), expected, "cross-replica context", tolerance=0)


def train_a_step(strategy, model, optimizer, x=None):
    """Leaves gradients, optimizer state and used buffers behind."""
    x = torch.randn(12, 2) if x is None else x
    optimizer.zero_grad()
    model(x).square().sum(1).mean().backward()
    optimizer.step()


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
