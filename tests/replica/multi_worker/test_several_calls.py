"""A pass through several calls is told of where workers' proportions differ, and only there."""

import warnings

import pytest
import torch
from torch import nn

import mirror


def passes(sizes, *, in_run=False):
    """Trains a step by two calls of these sizes per worker; returns what was warned of."""
    with mirror.MultiWorkerMirroredStrategy(["cpu"]) as strategy:
        rank = strategy._group.replicas.workers.rank
        with strategy.scope():
            model = nn.Linear(3, 1)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                if in_run:
                    strategy.run(lambda: sum(_losses(model, sizes[rank])).backward())
                else:
                    sum(_losses(model, sizes[rank])).backward()
                assert model.weight.grad is not None
        return [str(one.message) for one in caught if "proportions" in str(one.message)]


def _losses(model, sizes):
    return [model(torch.ones(size, 3)).mean() for size in sizes]


@pytest.mark.parametrize(
    "sizes", [[(4, 4), (4, 4)], [(4, 4), (2, 2)], [(4, 2), (8, 4)], [(3,), (5,)]]
)
def test_equal_proportions_are_right(worker_pool, sizes):
    assert worker_pool(2).run(passes, sizes) == [[], []]


def test_unlike_ones_are_told_once_on_all_workers(worker_pool):
    for told in worker_pool(2).run(passes, [(4, 2), (4, 4)]):
        (message,) = told
        assert "worker 0: 4, 2; worker 1: 4, 4" in message
        assert "inside strategy.run" in message


def test_inside_run_nothing_is_told(worker_pool):
    assert worker_pool(2).run(passes, [(4, 2), (4, 4)], in_run=True) == [[], []]
