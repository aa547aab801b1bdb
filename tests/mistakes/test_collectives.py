"""Mistakes with what all replicas must reach: collectives, steps, equal results."""

import pytest
import torch
from torch import nn

import mirror
from mirror import DivergenceError
from tests.mistakes.mistake import (
    X,
    Y,
    loss_of,
    mirrored,
    net,
    refused,
    replica_id,
    step,
    trains_as_plain,
)


@refused(ValueError, "init_process_group", "all_reduce", "get_replica_context")
def test_gradients_averaged_by_torch_distributed(strategy):
    def program(model, optimizer, x, y):
        loss_of(model, x, y).backward()
        for p in model.parameters():
            torch.distributed.all_reduce(p.grad)

    trains_as_plain(strategy, program)


@refused(ValueError, "init_process_group", "replica_id_in_sync_group")
def test_the_rank_asked_of_torch_distributed(strategy):
    strategy.run(lambda: torch.distributed.get_rank() == 0)


@refused(ValueError, "init_process_group", "get_replica_context")
def test_a_barrier_of_torch_distributed(strategy):
    strategy.run(torch.distributed.barrier)


@refused(ValueError, "init_process_group")
def test_the_world_size_asked_of_torch_distributed(strategy):
    strategy.run(torch.distributed.get_world_size)


@refused(DivergenceError, "optimizer.step", "replica 0")
def test_the_step_on_one_replica_alone(strategy):
    def program(model, optimizer, x, y):
        loss_of(model, x, y).backward()
        if replica_id() == 0:
            optimizer.step()

    trains_as_plain(strategy, program)


def test_backward_on_one_replica_alone_counts_its_share(strategy):
    """A replica without a loss counts zero: as one device that leaves those examples out."""
    model, _optimizer, batch = mirrored(strategy)

    def program(x, y):
        if replica_id() == 0:
            loss_of(model, x, y).backward()

    strategy.run(program, args=batch)
    expected = net()
    (nn.functional.cross_entropy(expected(X[:4]), Y[:4]) / 2).backward()
    assert torch.allclose(model[0].weight.grad, expected[0].weight.grad)


@refused(DivergenceError, "all_reduce", "replica 0")
def test_a_collective_in_a_condition(strategy):
    def program():
        if replica_id() == 0:
            mirror.get_replica_context().all_reduce("sum", torch.ones(1))

    strategy.run(program)


@refused(DivergenceError, "merge_call")
def test_a_merge_call_in_a_condition(strategy):
    def program():
        if replica_id() == 1:
            mirror.get_replica_context().merge_call(lambda strategy: None)

    strategy.run(program)


@refused(DivergenceError, "float32[1]", "float32[2]")
def test_a_collective_of_unlike_shapes(strategy):
    strategy.run(
        lambda: mirror.get_replica_context().all_reduce("sum", torch.ones(1 + replica_id()))
    )


@refused(DivergenceError, "all_reduce", "all_gather")
def test_unlike_collectives(strategy):
    def program():
        context, value = mirror.get_replica_context(), torch.ones(1)
        return context.all_reduce("sum", value) if replica_id() else context.all_gather(value)

    strategy.run(program)


@refused(DivergenceError, "all_reduce")
def test_a_number_of_collectives_that_depends_on_the_replica(strategy):
    def program():
        for _ in range(1 + replica_id()):
            mirror.get_replica_context().all_reduce("sum", torch.ones(1))

    strategy.run(program)


@refused(DivergenceError, "replica")
def test_an_early_return_before_a_collective(strategy):
    def program():
        if replica_id():
            return torch.zeros(1)
        return mirror.get_replica_context().all_reduce("sum", torch.ones(1))

    strategy.run(program)


def test_a_collective_whose_error_is_swallowed(strategy):
    def program():
        try:
            if replica_id():
                mirror.get_replica_context().all_reduce("sum", torch.ones(1))
        except Exception:
            pass

    with pytest.raises(DivergenceError):
        strategy.run(program)


@refused(mirror.StructureError, "same structure")
def test_results_of_unlike_structure(strategy):
    strategy.run(lambda: {"a": 1} if replica_id() else {"b": 1})


@refused(mirror.StructureError, "same structure")
def test_a_result_on_the_first_replica_alone(strategy):
    strategy.run(lambda: {"loss": 1} if replica_id() == 0 else None)


def test_early_stopping_on_a_replicas_own_loss(strategy):
    def program(model, optimizer, x, y):
        for _ in range(3):
            loss = step(model, optimizer, x, y)
            if loss.item() < 0.69 and replica_id() == 0:
                return
            if replica_id() == 0:
                return

    with pytest.raises(DivergenceError, match="replica 0"):
        trains_as_plain(strategy, program)
