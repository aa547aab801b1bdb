"""Idle replicas: they skip a step without examples, and get what merge_call changes."""

import threading

import pytest
import torch

import mirror
from mirror.threads import schedule
from mirror.threads.schedule import StallDetector
from tests.oracle import finishes, in_run
from tests.strategy.programs import values
from tests.toy_models import mirrored_layer, replica_id, sgd


def counted(strategy, size):
    (batch,) = strategy.distribute_dataset([torch.arange(float(size))])
    return batch


def test_replicas_without_examples_sit_the_step_out(make_strategy):
    strategy = make_strategy(4)
    called = []

    def fn(x):
        called.append(replica_id())
        assert len(x) == 1
        return x.sum()

    result = strategy.run(fn, args=(counted(strategy, 2),))
    assert called == [0, 1]
    assert values(strategy, result) == [0.0, 1.0]
    assert strategy.reduce("sum", result).item() == 1.0
    assert strategy.reduce("mean", result).item() == 0.5


def test_collectives_span_the_replicas_that_take_part(make_strategy):
    strategy = make_strategy(4)

    def fn(x):
        context = mirror.get_replica_context()
        return (
            context.all_reduce("sum", torch.ones(())),
            context.all_reduce("mean", x.sum()),
            context.all_gather(x),
            context.merge_call(lambda s, v: s.reduce("sum", v), args=(x.sum(),)),
        )

    count, mean, gathered, merged = strategy.run(fn, args=(counted(strategy, 3),))
    assert values(strategy, count) == [3.0] * 3
    assert values(strategy, mean) == [1.0] * 3
    assert [t.tolist() for t in strategy.local_results(gathered)] == [[0.0, 1.0, 2.0]] * 3
    assert values(strategy, merged) == [3.0] * 3


def test_replica_zero_sits_out_after_all_have_run(leaks):
    # The first one that takes part ran in the caller's thread, and waited there at the gate where
    # the thread it had from the run before waited, too: one of the two was woken.
    parts = [mirror.values.ABSENT, torch.ones(1), torch.ones(1)]

    def step(x):
        for _ in range(3):
            x = mirror.get_replica_context().all_reduce("sum", x)
        return x

    def use():
        with mirror.MirroredStrategy(["cpu"] * 3) as strategy:
            for _ in range(3):
                strategy.run(step, args=(mirror.PerReplica([torch.ones(1)] * 3),))
                result = strategy.run(step, args=(mirror.PerReplica(parts),))
                assert strategy.local_results(result) == (8, 8)
            assert len(leaks.threads()) == 2

    _, error, _ = finishes(use)
    assert error is None


def test_merge_call_brings_idle_replicas_along(make_strategy):
    # A replica without a part of the batch kept the weights from before the others' step.
    strategy = make_strategy(3)
    layer = mirrored_layer(strategy)
    optimizer = sgd(layer, lr=2.0)

    def evaluate(strategy):
        return layer(torch.ones(3, 1)).detach().flatten().tolist()

    def step(batch):
        layer(batch).mean().backward()
        optimizer.step()
        return mirror.get_replica_context().merge_call(evaluate)

    outputs = in_run(strategy, step, torch.ones(2, 1))
    assert strategy.local_results(outputs)[0] == [-1.0, -1.0, -1.0]
    strategy.check_replicas()


def test_merge_call_that_raises_leaves_replicas_equal(make_strategy):
    # What the function wrote before it raised reached the first replica only.
    strategy = make_strategy(2)
    layer = mirrored_layer(strategy)

    @torch.no_grad()
    def write_and_fail(strategy):
        layer.weight.add_(1)
        raise ValueError("after writing")

    def step():
        with pytest.raises(ValueError, match="after writing"):
            mirror.get_replica_context().merge_call(write_and_fail)
        return layer(torch.ones(1, 1)).item()

    assert strategy.local_results(strategy.run(step)) == (2.0, 2.0)
    strategy.check_replicas()


def test_merge_call_may_take_longer_than_the_timeout_while_its_runs_move(
    make_strategy, monkeypatch
):
    # An evaluation in merge_call was cut off: the outer run saw none of its inner runs move.
    seconds, now, polls = 0.05, [0.0], []
    caller, is_evaluating, poll = threading.current_thread(), threading.Event(), StallDetector.poll

    def poll_later(self, *state):
        if threading.current_thread() is caller and is_evaluating.is_set():  # the outer run's
            now[0] += 2 * seconds if polls else 0.0
            polls.append(now[0])
        return poll(self, *state)

    monkeypatch.setattr(schedule, "monotonic", lambda: now[0])
    monkeypatch.setattr(StallDetector, "poll", poll_later)
    options = mirror.CommunicationOptions(timeout_seconds=seconds)
    strategy = make_strategy(2, communication_options=options)

    def evaluate(strategy):
        is_evaluating.set()
        while len(polls) < 4:
            strategy.run(lambda: None)
        is_evaluating.clear()
        return 1

    results = strategy.run(lambda: mirror.get_replica_context().merge_call(evaluate))
    assert strategy.local_results(results) == (1, 1)
