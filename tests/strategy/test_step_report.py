"""Reports of a strategy: what it did in its steps adds up to them."""

import itertools

import pytest
import torch

from mirror.base import timeline as module
from mirror.base.timeline import BACKWARD, FORWARD, KINDS, WAITING
from tests.oracle import finishes
from tests.strategy.timed import training
from tests.toy_models import ONES, mirrored_layer, sgd

# Threads


def test_strategies_in_threads_of_their_own_keep_their_times_apart(make_strategy):
    # The spans of the cross-replica context went to the strategy that ran last, whichever thread
    # they came from, and two threads popped from one list: `optimizer.step()` raised IndexError.
    def begin(strategy):
        layer = mirrored_layer(strategy)
        return sgd(layer), layer(ONES).mean()

    def end(optimizer, loss):
        loss.backward()
        optimizer.step()

    here, there = make_strategy(2), make_strategy(2)
    begun = begin(here)
    _, error, _ = finishes(lambda: end(*begin(there)))
    assert error is None
    end(*begun)
    assert [here.report().num_steps, there.report().num_steps] == [1, 1]


# Optimizers and their state


def test_a_subclass_that_steps_its_base_takes_one_step_of_the_report(make_strategy):
    # The steps of the base on every replica, inside the one that was called, ended a step each.
    class Subclass(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    torch.optim.SGD([torch.ones(1)])  # torch puts its hooks around the base's step now
    strategy = make_strategy(3)
    layer = mirrored_layer(strategy)
    optimizer = Subclass(layer.parameters(), lr=0.1)
    for i in range(3):
        layer(ONES).mean().backward()
        optimizer.step()
        assert strategy.report().num_steps == i + 1


@pytest.fixture
def ticking(monkeypatch):
    """A clock that moves a millisecond whenever it is looked at."""
    ticks = itertools.count()
    monkeypatch.setattr(module, "perf_counter", lambda: next(ticks) * 1e-3)


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("where", ["inside", "outside"])
def test_under_lockstep_the_rows_add_up_to_the_step(make_strategy, ticking, n, where):
    strategy = make_strategy(n)
    inside, outside = training(strategy)
    step = inside if where == "inside" else outside
    for i in range(3):
        step(torch.ones(4, 2))
        assert strategy.report().num_steps == i + 1
    for whole, lanes in strategy._group.replicas.timeline.steps:
        spent = sum(lane[kind] for lane in lanes for kind in KINDS if kind != WAITING)
        assert 0 < spent <= whole + 1e-9
        # The only replica's forward outside run is a plain call.
        assert (lanes[0][FORWARD] > 0) == (n > 1 or where == "inside")
        assert sum(lane[BACKWARD] for lane in lanes) > 0
    report = strategy.report()
    rows = (
        report.waiting_for_input,
        report.forward,
        report.backward,
        report.waiting_for_reduction,
        report.optimizer,
        report.other,
    )
    assert sum(rows) == pytest.approx(report.step, rel=0.2)
    assert len(report.host_seconds) == n
    assert (report.waiting_for_reduction > 0) == (n > 1)


@pytest.mark.parametrize("schedule", ["lockstep", "staggered"])
def test_a_report_before_the_first_step_and_after_close(make_strategy, schedule):
    strategy = make_strategy(2, schedule=schedule)
    report = strategy.report()
    assert report.num_steps == 0
    assert "No step" in report.advice
    assert str(report)
    strategy.run(lambda: None)
    assert strategy.report().num_steps == 0
    inside, _ = training(strategy)
    inside(torch.ones(4, 2))
    strategy.close()
    assert strategy.report().num_steps == 1


def test_a_run_without_an_optimizer_ends_no_step(make_strategy):
    strategy = make_strategy(2)
    inside, _ = training(strategy)
    inside(torch.ones(4, 2))
    for _ in range(3):
        strategy.run(lambda: None)
    assert strategy.report().num_steps == 1
