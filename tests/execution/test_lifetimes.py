"""What the runner reports to its listeners, and when objects of a run are freed."""

import gc
import inspect
import sys
import traceback
import weakref
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import mirror
from mirror.execution.lifecycle import LifecycleHooks
from mirror.execution.run import Run
from tests.pairs import EXHAUSTIVE, each_once
from tests.profiled import profiled


class Result:
    """What a weak reference can tell of."""


def collected(reference):
    gc.collect()
    gc.collect()
    return reference() is None


@each_once(
    **{"n,active": [(1, 1), (3, 2), pytest.param(2, 1, marks=EXHAUSTIVE), (2, 2)]},
    schedule=["lockstep", "staggered"],
)
def test_a_strategy_and_what_its_last_run_returned_go_with_their_owner(n, active, schedule):
    def use():
        strategy = mirror.MirroredStrategy(["cpu"] * n, schedule=schedule)
        model = strategy.mirror(nn.Linear(2, 2))
        model(torch.ones(active, 2)).sum().backward()
        result = Result()
        strategy.run(lambda: result)
        model(torch.ones(active, 2))
        return weakref.ref(strategy), weakref.ref(result), weakref.ref(model)

    assert all(map(collected, use()))


def test_a_strategy_keeps_nothing_of_a_run_of_one_replica():
    with mirror.MirroredStrategy(["cpu"]) as strategy:
        references = []

        def fn():
            result = Result()
            references.append(weakref.ref(result))
            return result

        strategy.run(fn)
        assert collected(references[0])


def test_backward_passes_go_on_when_the_parameters_are_gone():
    strategy = mirror.MirroredStrategy(["cpu"] * 2)
    model = strategy.mirror(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)))
    loss = model(torch.ones(4, 3)).sum()
    del model
    gc.collect()
    for _ in range(6):
        loss.backward(retain_graph=True)
        strategy.run(lambda: None)


@pytest.mark.slow
def test_gradients_arrive_at_parameters_made_where_others_were():
    """A copy may lie where one was that has gone: nothing is remembered by its address."""
    strategy = mirror.MirroredStrategy(["cpu"] * 2)
    for _ in range(12):
        model = strategy.mirror(nn.Linear(3, 2))
        copies = model.weight._mirrored.copies
        del model
        gc.collect()
        for copy in copies:
            copy.requires_grad_(False)
            copy.requires_grad_(True)
        del copies, copy
        gc.collect()
        for fresh in [strategy.mirror(nn.Linear(3, 2)) for _ in range(5)]:
            fresh(torch.ones(4, 3)).sum().backward()
            torch.testing.assert_close(fresh.weight.grad, torch.full((2, 3), 4.0))


class Remembers(nn.Module):
    """Sets an attribute in every forward."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x):
        self.seen = x.detach().sum()
        return self.inner(x)


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Remembers()

    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=False)


def test_recomputations_leave_no_runs():
    strategy = mirror.MirroredStrategy(["cpu"] * 2)
    model = strategy.mirror(Checkpointed())

    def num_runs():
        gc.collect()
        return sum(type(one) is Run for one in gc.get_objects())

    def train(steps):
        for _ in range(steps):
            model(torch.ones(4, 2, requires_grad=True)).sum().backward()

    train(3)
    before = num_runs()
    train(10)
    assert num_runs() <= before


def test_an_optimizer_that_raised_and_is_gone_keeps_no_other_from_training():
    strategy = mirror.MirroredStrategy(["cpu"] * 2)
    model = strategy.mirror(nn.Linear(2, 1))

    sgd_step = inspect.unwrap(torch.optim.SGD.step).__code__

    def fail(frame, event, argument):
        """Raises in the update that is made once for all, while one replica's groups are in."""
        if event == "call" and frame.f_code is sgd_step:
            sys.setprofile(None)
            raise RuntimeError("within the step")

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(4, 2)).sum().backward()
    with pytest.raises(RuntimeError, match="within") as caught, profiled(fail):
        optimizer.step()
    traceback.clear_frames(caught.tb)  # as unittest's assertRaises does
    del optimizer, caught
    gc.collect()
    fresh = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        before = model.weight.detach().clone()
        fresh.zero_grad()
        model(torch.ones(4, 2)).sum().backward()
        fresh.step()
        assert not torch.equal(before, model.weight.detach())


WHOLE = ["returned", "finish", "ran (0, 1, 2)", "settle"]


class Recorder:
    """A part that notes what it hears."""

    def __init__(self, name="recorder"):
        self.heard = []
        self._name = name

    def part(self):
        def record(event):
            return lambda *args: self.heard.append(" ".join([event, *map(str, args)]))

        return LifecycleHooks(
            name=self._name,
            prepare=record("prepare"),
            on_return=record("returned"),
            finish=lambda run: self.heard.append("finish"),
            on_run_end=record("ran"),
            sync_idle=record("bring_along"),
            on_synced=record("settle"),
            recover=record("recover"),
        )


@pytest.fixture(params=["lockstep", "staggered"])
def strategy(request, make_strategy):
    return make_strategy(3, schedule=request.param)


@pytest.fixture
def events(strategy):
    recorder = Recorder()
    strategy._group.runner.set_hooks([recorder.part()])
    return recorder.heard


def meet(fn=lambda strategy: None):
    mirror.get_replica_context().merge_call(fn)


def test_a_run_is_prepared_and_ended(strategy, events):
    strategy.run(lambda: events.append("runs"))
    assert events == ["prepare", *["runs"] * 3, *WHOLE]


def test_those_that_sat_out_are_brought_along(strategy, events):
    (batch,) = strategy.distribute_dataset([torch.ones(2)])
    strategy.run(lambda x: None, (batch,))
    ended = ["returned", "finish", "ran (0, 1)", "bring_along 0 [2]", "settle"]
    assert events == ["prepare", *ended]


def test_a_run_that_fails_recovers(strategy, events):
    with pytest.raises(ZeroDivisionError):
        strategy.run(lambda: 1 / 0)
    assert events == ["prepare", "recover", "ran (0, 1, 2)"]


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


def test_merge_call_is_the_end_of_one_run_and_the_beginning_of_another(strategy, events):
    strategy.run(lambda: meet(lambda strategy: events.append("outside")))
    assert events == ["prepare", *WHOLE[1:], "outside", "prepare", *WHOLE]


def test_a_run_in_merge_call_is_a_whole_one(strategy, events):
    strategy.run(lambda: meet(lambda strategy: strategy.run(lambda: None) and None))
    assert events == ["prepare", *WHOLE[1:], "prepare", *WHOLE, "prepare", *WHOLE]


def test_merge_call_that_fails_is_prepared_and_recovers(strategy, events):
    def fail(strategy):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        strategy.run(lambda: meet(fail))
    assert events == ["prepare", *WHOLE[1:], "prepare", "recover", "ran (0, 1, 2)"]


def test_hooks_of_parts_are_called_in_order(strategy):
    first, second = Recorder("first"), Recorder("second")
    second.heard = first.heard
    strategy._group.runner.set_hooks([first.part(), second.part()])
    strategy.run(lambda: None)
    assert first.heard == [event for event in ["prepare", *WHOLE] for _ in range(2)]
