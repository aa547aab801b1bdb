"""The number of calls and messages in a step of two workers does not rise."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mirror
from tests.benchmarks.test_calls import calls_of
from tests.worker_pool import WorkerPool

STEPS = 3
WIDTHS = {8: (16, 32, 32, 32, 10), 48: (*(16,) * 24, 10)}  # by number of tensors


@pytest.fixture(scope="module")
def fresh():
    """Two workers of this file only: leftovers of other tests in a process cost calls."""
    worker_pool = WorkerPool(2)
    yield worker_pool
    worker_pool.close()


def net(num_tensors):
    torch.manual_seed(0)
    widths = WIDTHS[num_tensors]
    pairs = pairwise(widths)
    layers = [layer for pair in pairs for layer in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def step_of(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step(x, y):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def counted(num_tensors, way, num_local):
    """Returns how much a step calls, and how many collectives it begins."""
    x, y = torch.randn(4 * num_local, 16), torch.zeros(4 * num_local, dtype=torch.int64)
    strategy = mirror.MultiWorkerMirroredStrategy(["cpu"] * num_local)
    step = step_of(strategy.mirror(net(num_tensors)))
    parts = tuple(mirror.PerReplica(t.split(4)) for t in (x, y))

    def one():
        return step(x, y) if way == 1 else strategy.run(step, args=parts)

    calls = calls_of(one)
    begun = strategy._group.replicas.workers._heartbeats.started
    before = sum(begun.values())
    for _ in range(STEPS):
        one()
    messages = sum(begun.values()) - before
    strategy.close()
    return calls, messages / STEPS


@pytest.mark.parametrize(
    ("num_tensors", "way", "most"), [(8, 1, 683), (8, 3, 653), (48, 1, 1723), (48, 3, 1653)]
)
def test_a_step_of_two_workers(fresh, num_tensors, way, most):
    for calls, messages in fresh.run(counted, num_tensors, way, 1):
        assert calls <= most
        assert messages == 1


def test_replicas_of_a_worker_travel_in_one_message(fresh):
    for _, messages in fresh.run(counted, 8, 3, 2):
        assert messages == 1
