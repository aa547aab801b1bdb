"""Buffers read on one worker are those over all of them."""

import pytest
import torch

import mirror
from tests.replica.multi_worker.programs import Net, rank, strategy_of

BATCH = torch.arange(48.0).reshape(12, 4).sin()


def buffers_after_training(strategy, batches, aggregation):
    with strategy.scope():
        model = Net()
    if aggregation is not None:
        model.norm.register_buffer("seen", torch.zeros(()))
        mirror.set_aggregation(model.norm, "seen", aggregation)

    def step(x):
        if aggregation is not None:
            model.norm.seen += x.sum()
        return model(x)

    for _ in range(2):
        strategy.run(step, args=(mirror.PerReplica(list(batches)),))
    return {name: value.tolist() for name, value in model.named_buffers()}


def trained(num_local, aggregation):
    with strategy_of(num_local) as strategy:
        batches = BATCH.chunk(2)[rank()].chunk(num_local)
        return buffers_after_training(strategy, batches, aggregation)


def of_one_process(num_local, aggregation):
    with mirror.MirroredStrategy(["cpu"] * 2 * num_local) as strategy:
        torch.manual_seed(0)
        return buffers_after_training(strategy, BATCH.chunk(2 * num_local), aggregation)


@pytest.mark.parametrize("aggregation", [None, "sum", "mean", "first"])
@pytest.mark.parametrize("num_local", [1, 2])
def test_they_are_those_of_as_many_replicas_of_one_process(worker_pool, num_local, aggregation):
    first, second = worker_pool(2).run(trained, num_local, aggregation)
    assert first == second
    for name, value in of_one_process(num_local, aggregation).items():
        assert first[name] == pytest.approx(value, rel=1e-6), name
