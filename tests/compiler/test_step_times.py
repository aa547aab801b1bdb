"""Compiled steps end steps, and say where their time goes."""

import itertools
import json

import pytest

import mirror
from mirror.base import timeline as module
from mirror.execution.runner import EveryNSteps
from tests.compiler.training import Beside, batches
from tests.pairs import quick_of


def train(beside, num_steps):
    """Takes compiled steps alone: the plain loop's would count, too."""
    (batch,) = beside.strategy.distribute_dataset(batches([12]))
    for _ in range(num_steps):
        beside.compiled(*batch)


def test_a_compiled_call_ends_a_step_as_an_eager_one_does():
    beside = Beside(2)
    ends = []
    beside.strategy._group.replicas.timeline.at_step_ends.append(lambda: ends.append(1))
    train(beside, 4)
    assert len(ends) == beside.strategy.report().num_steps == 4
    assert beside.compiled.num_traces == 1


def test_a_compiled_evaluation_ends_no_step():
    beside = Beside(2)
    evaluate = beside.strategy.compile(lambda x, y: beside.model(x).sum(), mode="trace")
    (batch,) = beside.strategy.distribute_dataset(batches([8]))
    for _ in range(3):
        evaluate(*batch)
    assert evaluate.num_traces == 1
    assert beside.strategy.report().num_steps == 0


@pytest.mark.parametrize("n", quick_of([1, 2, 3], [2]))
def test_the_parts_of_a_compiled_step_add_up_to_it(monkeypatch, n):
    beside = Beside(n)
    train(beside, 2)
    ticks = itertools.count()
    timeline = beside.strategy._group.replicas.timeline
    monkeypatch.setattr(timeline, "clock", lambda: next(ticks) * 1e-3)
    train(beside, 4)
    report = beside.strategy.report()
    parts = report.compiled
    assert parts.num_steps == 5  # all but the first
    assert (parts.num_calls, parts.num_traces) == (5, 1)
    assert parts.host > 0
    assert parts.own_programs + parts.shared_programs > 0
    assert n == 1 or min(parts.own_programs, parts.shared_programs, parts.reductions) > 0
    spent = parts.own_programs + parts.shared_programs + parts.host
    assert report.programs == pytest.approx(spent)
    assert report.waiting_for_reduction == pytest.approx(parts.reductions)
    assert report.forward == report.backward == report.optimizer == 0
    assert report.step >= report.programs + report.waiting_for_reduction
    assert "5 compiled calls; traced and compiled 1 times" in str(report)
    assert report.to_dict()["compiled"]["num_calls"] == 5


def test_what_compiling_takes_is_told():
    beside = Beside(2)
    assert beside.strategy.report().compiled is None
    train(beside, 2)
    assert beside.strategy.report().compiled.compile_seconds > 0


def test_a_trace_shows_a_compiled_steps_parts(tmp_path):
    beside = Beside(2)
    train(beside, 2)
    with beside.strategy.trace(tmp_path / "trace.json"):
        train(beside, 2)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = [event["cat"] for event in events if event["ph"] == "X"]
    for kind in (module.COMPILED, module.PROGRAMS, module.SHARED_PROGRAMS, module.REDUCTION):
        assert names.count(kind) == 2


def test_a_compiled_step_is_the_end_that_a_preemption_handler_waits_for(tmp_path):
    beside = Beside(2)
    (batch,) = beside.strategy.distribute_dataset(batches([8]))
    manager = mirror.CheckpointManager(mirror.Checkpoint(model=beside.model), tmp_path)
    asked = []

    def watch():
        asked.append(1)
        return len(asked) == 3

    with (
        pytest.raises(SystemExit, match="42"),
        mirror.PreemptionCheckpointHandler(manager, signals=(), watcher=watch),
    ):
        for _ in range(5):
            beside.compiled(*batch)
    assert beside.compiled.num_traces == 1
    assert manager.restore_latest() == 3


def test_guards_look_after_every_so_many_compiled_steps():
    beside = Beside(2)
    looks = []
    EveryNSteps(2, beside.strategy._group.runner, lambda: looks.append(1))
    train(beside, 5)
    assert len(looks) == 2


def test_names_of_parameters_are_searched_for_when_something_has_changed(monkeypatch):
    # A search goes through all objects there are: most of the time of a trace.
    searched = []
    monkeypatch.setattr(
        "mirror.compiler.step_inputs.path_of", lambda p, name: searched.append(1) or name
    )
    beside = Beside(2)
    train(beside, 3)
    assert (beside.compiled.num_traces, searched) == (1, [])
    next(beside.model.parameters()).requires_grad_(False)
    train(beside, 1)
    assert (beside.compiled.num_traces, searched) == (2, [1])
