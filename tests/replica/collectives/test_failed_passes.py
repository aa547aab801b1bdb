"""A backward pass outside ``run`` that fails among the gradients of a collective."""

import gc

import pytest
import torch
from torch import nn

import mirror
from mirror.replica.collectives.autograd_nodes import Arrivals


class Summing(nn.Module):
    """Its backward pass fails after the gradients of a sum over replicas have arrived."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x):
        h = self.layer(x)
        h.register_hook(fail)
        return mirror.get_replica_context().all_reduce("sum", h)


def fail(grad):
    raise ValueError("in backward")


def num_arrivals():
    gc.collect()
    return sum(isinstance(one, Arrivals) for one in gc.get_objects())


def test_it_leaves_no_gradients_with_the_collective():
    strategy = mirror.MirroredStrategy(["cpu"] * 2, verify="off")
    model = strategy.mirror(Summing())
    loss = model(torch.ones(4, 2)).sum()
    for _ in range(3):
        with pytest.raises(ValueError, match="in backward"):
            loss.backward(retain_graph=True)
    assert num_arrivals() == 0
