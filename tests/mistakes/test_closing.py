"""Mistakes with what is over: closed strategies, contexts of runs that have ended."""

import copy

import torch

import mirror
from mirror import StrategyError
from tests.mistakes.mistake import (
    X,
    loader,
    loss_of,
    mirrored,
    net,
    plain,
    refused,
    replica_id,
    same,
    sgd,
    step,
)


def test_a_cell_run_again_makes_a_new_strategy_over_a_copy(strategy):
    model, _, _ = mirrored(strategy)
    with mirror.MirroredStrategy(["cpu"] * 3) as again:
        model = again.mirror(copy.deepcopy(model))
        optimizer = sgd(model)
        for _ in range(2):
            step(model, optimizer)
        assert same(model, plain())


@refused(StrategyError, "closed", "new one")
def test_a_cell_run_again_with_a_closed_strategy():
    strategy = mirror.MirroredStrategy(["cpu"] * 2)
    model, _, batch = mirrored(strategy)
    strategy.close()
    strategy.run(model, args=(batch[0],))


@refused(StrategyError, "closed")
def test_a_mirrored_model_called_after_close():
    with mirror.MirroredStrategy(["cpu"] * 2) as strategy:
        model, _, _ = mirrored(strategy)
    model(X)


@refused(StrategyError, "closed")
def test_an_optimizer_stepped_after_close():
    with mirror.MirroredStrategy(["cpu"] * 2) as strategy:
        model, optimizer, _ = mirrored(strategy)
        loss_of(model).backward()
    optimizer.step()


@refused(StrategyError, "closed")
def test_a_scope_after_close():
    strategy = mirror.MirroredStrategy(["cpu"] * 2)
    strategy.close()
    with strategy.scope():
        pass


@refused(StrategyError, "closed")
def test_a_dataset_iterated_after_close():
    with mirror.MirroredStrategy(["cpu"] * 2) as strategy:
        batches = strategy.distribute_dataset(loader(4))
    next(iter(batches))


@refused(StrategyError, "inside run")
def test_close_inside_run(strategy):
    strategy.run(strategy.close)


def test_close_twice(strategy):
    strategy.close()
    strategy.close()


def test_a_model_stays_readable_after_close():
    with mirror.MirroredStrategy(["cpu"] * 2) as strategy:
        model, _, _ = mirrored(strategy)
    assert same(copy.deepcopy(model), net())


@refused(StrategyError, "ended")
def test_a_context_kept_after_its_run_reduces(strategy):
    contexts = []
    strategy.run(lambda: contexts.append(mirror.get_replica_context()))
    contexts[0].all_reduce("sum", torch.ones(1))


@refused(StrategyError, "ended")
def test_a_contexts_weight_set_after_its_run(strategy):
    contexts = []
    strategy.run(lambda: contexts.append(mirror.get_replica_context()))
    contexts[0].weight = 3.0


@refused(StrategyError, "replica")
def test_another_replicas_weight_set(strategy):
    contexts = {}

    def fn():
        contexts[replica_id()] = mirror.get_replica_context()
        mirror.get_replica_context().all_reduce("sum", 1)
        contexts[1 - replica_id()].weight = 2.0

    strategy.run(fn)


@refused(ValueError, "weight", "finite")
def test_a_negative_weight(strategy):
    def fn():
        mirror.get_replica_context().weight = -1

    strategy.run(fn)
