"""Reports and traces of a strategy: what it did in its steps, and when."""

import itertools
import json

import pytest
import torch
from torch import nn

import mirror
from mirror.base import timeline as module
from mirror.base.timeline import BACKWARD, FORWARD, KINDS, OPTIMIZER, REDUCTION, WAITING
from tests.oracle import finishes
from tests.strategy.programs import training
from tests.toy_models import ONES, mirrored_layer, sgd


def events_of(path):
    trace = json.loads(path.read_text())
    assert set(trace) == {"displayTimeUnit", "otherData", "traceEvents"}
    lanes = {}
    spans = []
    for event in trace["traceEvents"]:
        if event["ph"] == "M":
            assert event["name"] == "thread_name"
            lanes[event["tid"]] = event["args"]["name"]
        else:
            assert event["ph"] == "X"
            assert event["dur"] >= 0
            assert event["cat"] in KINDS
            spans.append(event)
    assert {event["tid"] for event in spans} <= set(lanes)
    assert len({event["pid"] for event in spans}) <= 1
    return lanes, spans


@pytest.mark.replicated_state
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("schedule", ["lockstep", "staggered", "parallel"])
def test_a_trace_has_a_lane_for_each_replica_with_its_passes(make_strategy, tmp_path, n, schedule):
    strategy = make_strategy(n, schedule=schedule)
    inside, _ = training(strategy)
    with strategy.trace(tmp_path / "trace.json"):
        for _ in range(2):
            inside(torch.ones(6, 2))
    lanes, spans = events_of(tmp_path / "trace.json")
    assert list(lanes.values())[:n] == [f"replica {r} of {n} (cpu)" for r in range(n)]
    for r in range(n):
        kinds = [span["cat"] for span in spans if span["tid"] == r]
        assert kinds.count(FORWARD) == kinds.count(BACKWARD) == kinds.count(OPTIMIZER) == 2
        assert (WAITING in kinds) == (n > 1)
    for r in range(n):
        mine = sorted((s["ts"], s["ts"] + s["dur"]) for s in spans if s["tid"] == r)
        for (begin, end), (later, last) in itertools.pairwise(mine):
            assert begin <= later
            assert later >= end or last <= end + 1e-3, "spans of a lane nest"
    assert any(span["cat"] == REDUCTION for span in spans) == (n > 1)


def test_a_trace_outside_run_has_the_backward_pass_and_the_step(make_strategy, tmp_path):
    strategy = make_strategy(2)
    _, outside = training(strategy)
    with strategy.trace(tmp_path / "trace.json"):
        outside(torch.ones(4, 2))
    lanes, spans = events_of(tmp_path / "trace.json")
    cross = [s["cat"] for s in spans if lanes[s["tid"]] == "cross-replica context"]
    assert cross.count(BACKWARD) == cross.count(OPTIMIZER) == 1
    assert [span["name"] for span in spans if span["cat"] == OPTIMIZER] == ["SGD.step"]


def test_merge_call_spends_the_time_of_the_cross_replica_context(make_strategy, tmp_path):
    strategy = make_strategy(2)
    other = nn.Linear(1, 1)

    def merged(strategy):
        other(torch.ones(1, 1)).sum().backward()

    with strategy.trace(tmp_path / "trace.json"):
        strategy.run(lambda: mirror.get_replica_context().merge_call(merged))
    lanes, spans = events_of(tmp_path / "trace.json")
    (backward,) = (span for span in spans if span["cat"] == BACKWARD)
    assert lanes[backward["tid"]] == "cross-replica context"


def test_nothing_happening_makes_an_empty_trace(make_strategy, tmp_path):
    strategy = make_strategy(2)
    with strategy.trace(tmp_path / "trace.json"):
        pass
    lanes, spans = events_of(tmp_path / "trace.json")
    assert len(lanes) == 4
    assert not spans
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert trace["otherData"]["hidden_share_of_communication"] is None


def test_a_trace_inside_a_trace_is_refused_and_the_outer_one_goes_on(make_strategy, tmp_path):
    strategy = make_strategy(2)
    inside, _ = training(strategy)
    with strategy.trace(tmp_path / "outer.json"):
        inner = strategy.trace(tmp_path / "inner.json")
        with pytest.raises(mirror.StrategyError, match="already"), inner:
            pytest.fail("a trace inside a trace")
        inside(torch.ones(4, 2))
    assert events_of(tmp_path / "outer.json")[1]
    assert [path.name for path in tmp_path.iterdir()] == ["outer.json"]
    with strategy.trace(tmp_path / "outer.json"):
        pass
    assert not events_of(tmp_path / "outer.json")[1]


def test_a_trace_inside_run_is_refused(make_strategy, tmp_path):
    strategy = make_strategy(2)

    def step():
        with strategy.trace(tmp_path / "trace.json"):
            pytest.fail("a trace inside run")

    with pytest.raises(mirror.StrategyError, match="inside run"):
        strategy.run(step)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("where", ["inside", "outside"])
def test_an_error_in_a_trace_is_written_and_passed_on(make_strategy, tmp_path, where):
    strategy = make_strategy(2)

    def fail():
        x = torch.ones(2, requires_grad=True)
        x.register_hook(lambda grad: 1 / 0)
        x.sum().backward()

    with pytest.raises(ZeroDivisionError), strategy.trace(tmp_path / "trace.json"):
        strategy.run(fail) if where == "inside" else fail()
    assert BACKWARD in {span["cat"] for span in events_of(tmp_path / "trace.json")[1]}
    inside, _ = training(strategy)
    with strategy.trace(tmp_path / "trace.json"):
        inside(torch.ones(4, 2))
    _, spans = events_of(tmp_path / "trace.json")
    assert sum(span["cat"] == BACKWARD for span in spans) == 2


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("missing/trace.json", FileNotFoundError),
        ("folder", IsADirectoryError),
        ("kept.json/trace.json", NotADirectoryError),
        ("x" * 300, OSError),
    ],
)
def test_a_trace_that_cannot_be_written_raises_before_it_begins(
    make_strategy, tmp_path, name, error
):
    (tmp_path / "folder").mkdir()
    (tmp_path / "kept.json").write_text("kept")
    strategy = make_strategy(2)
    trace = strategy.trace(tmp_path / name)
    with pytest.raises(error, match="a trace needs the path of a file") as raised, trace:
        pytest.fail("a trace without a file")
    assert raised.value.filename == str(tmp_path / name)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["folder", "kept.json"]
    assert (tmp_path / "kept.json").read_text() == "kept"
    with strategy.trace(tmp_path / "trace.json"):  # the failed one is over
        pass
    assert (tmp_path / "trace.json").exists()


def test_a_relative_path_is_that_of_the_beginning(make_strategy, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    strategy = make_strategy(2)
    with strategy.trace("trace.json"):
        monkeypatch.chdir(tmp_path / "elsewhere")
    assert (tmp_path / "trace.json").exists()
    assert not (tmp_path / "elsewhere" / "trace.json").exists()


def test_each_strategy_traces_its_own(make_strategy, tmp_path):
    first, second = make_strategy(2), make_strategy(3)
    steps = [training(strategy)[0] for strategy in (first, second)]
    with first.trace(tmp_path / "first.json"), second.trace(tmp_path / "second.json"):
        steps[0](torch.ones(6, 2))
        steps[1](torch.ones(6, 2))
        steps[1](torch.ones(6, 2))
    counts = [
        sum(span["cat"] == FORWARD for span in events_of(tmp_path / name)[1])
        for name in ("first.json", "second.json")
    ]
    assert counts == [2, 6]


def test_the_caller_need_not_be_the_main_thread(make_strategy, tmp_path, request):
    is_parallel = request.config.getoption("--schedule") == "parallel"
    strategy = make_strategy(2)
    inside, outside = training(strategy)

    def use():
        with strategy.trace(tmp_path / "trace.json"):
            inside(torch.ones(4, 2))
            outside(torch.ones(4, 2))

    _, error, _ = finishes(use)
    assert error is None
    kinds = [span["cat"] for span in events_of(tmp_path / "trace.json")[1]]
    # Replicas that run at once also begin their parts of the pass outside run at once.
    assert kinds.count(BACKWARD) == (5 if is_parallel else 3)
    assert strategy.report().num_steps == 2


# Threads


def test_strategies_in_different_threads_have_their_own_times(make_strategy):
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
