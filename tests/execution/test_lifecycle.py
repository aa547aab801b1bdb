"""What the runner tells its parts, and in which order: the columns of [Note: Parts]."""

from dataclasses import replace

import pytest
import torch

import mirror
from mirror.execution.lifecycle import LifecycleHooks

WHOLE = ["returned", "finish", "ran (0, 1, 2)", "settle"]


class Recorder:
    """A part that notes what it hears."""

    def __init__(self, name="recorder"):
        self.heard = []
        self._name = name

    def part(self):
        def note(event):
            return lambda *args: self.heard.append(" ".join([event, *map(str, args)]))

        return LifecycleHooks(
            name=self._name,
            prepare=note("prepare"),
            on_return=note("returned"),
            finish=lambda run: self.heard.append("finish"),
            on_run_end=note("ran"),
            sync_idle=note("bring_along"),
            on_synced=note("settle"),
            recover=note("recover"),
        )


@pytest.fixture(params=["lockstep", "staggered"])
def strategy(request, make_strategy):
    return make_strategy(3, schedule=request.param)


@pytest.fixture
def heard(strategy):
    recorder = Recorder()
    strategy._group.runner.set_hooks([recorder.part()])
    return recorder.heard


def meet(fn=lambda strategy: None):
    mirror.get_replica_context().merge_call(fn)


def test_a_run_is_prepared_and_ended(strategy, heard):
    strategy.run(lambda: heard.append("runs"))
    assert heard == ["prepare", *["runs"] * 3, *WHOLE]


def test_those_that_sat_out_are_brought_along(strategy, heard):
    (batch,) = strategy.distribute_dataset([torch.ones(2)])
    strategy.run(lambda x: None, (batch,))
    ended = ["returned", "finish", "ran (0, 1)", "bring_along 0 [2]", "settle"]
    assert heard == ["prepare", *ended]


def test_a_run_that_fails_recovers(strategy, heard):
    with pytest.raises(ZeroDivisionError):
        strategy.run(lambda: 1 / 0)
    assert heard == ["prepare", "recover", "ran (0, 1, 2)"]


@pytest.mark.parametrize("event", ["recover", "on_run_end"])
@pytest.mark.parametrize("times", [1, 2])
def test_a_recovery_that_is_interrupted_begins_again(times, event, strategy):
    recorder, interrupts = Recorder(), [KeyboardInterrupt] * times
    part = recorder.part()

    def interrupted(*args):
        getattr(part, event)(*args)
        if interrupts:
            raise interrupts.pop()

    strategy._group.runner.set_hooks([replace(part, **{event: interrupted})])
    with pytest.raises(KeyboardInterrupt):
        strategy.run(lambda: 1 / 0)
    whole = ["recover", "ran (0, 1, 2)"]
    broken_off = (whole[:1] if event == "recover" else whole) * times
    if times == 1:  # else the next run begins with it
        assert recorder.heard == ["prepare", *broken_off, *whole]
    strategy.run(lambda: None)
    assert recorder.heard == ["prepare", *broken_off, *whole, "prepare", *WHOLE]


def test_merge_call_is_the_end_of_one_run_and_the_beginning_of_another(strategy, heard):
    strategy.run(lambda: meet(lambda strategy: heard.append("outside")))
    assert heard == ["prepare", *WHOLE[1:], "outside", "prepare", *WHOLE]


def test_a_run_in_merge_call_is_a_whole_one(strategy, heard):
    strategy.run(lambda: meet(lambda strategy: strategy.run(lambda: None) and None))
    assert heard == ["prepare", *WHOLE[1:], "prepare", *WHOLE, "prepare", *WHOLE]


def test_merge_call_that_fails_is_prepared_and_recovers(strategy, heard):
    def fail(strategy):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        strategy.run(lambda: meet(fail))
    assert heard == ["prepare", *WHOLE[1:], "prepare", "recover", "ran (0, 1, 2)"]


def test_parts_are_told_in_their_order(strategy):
    first, second = Recorder("first"), Recorder("second")
    second.heard = first.heard
    strategy._group.runner.set_hooks([first.part(), second.part()])
    strategy.run(lambda: None)
    assert first.heard == [event for event in ["prepare", *WHOLE] for _ in range(2)]
