"""mirror/viewer/trace_file.py: what strategy.trace gives, and what is kept in its file."""

import json

import pytest
import torch

import mirror
from tests.strategy.timed import training
from tests.viewer.made import NAMES, STEP, content


def test_a_strategy_gives_its_trace_which_draws_lanes_for_replicas(make_strategy, tmp_path):
    strategy = make_strategy(3)
    inside, _ = training(strategy)
    with strategy.trace(tmp_path / "step.json") as trace:
        inside(torch.ones(6, 2))
    trace.to_html(tmp_path / "step.html")
    trace.to_svg(tmp_path / "step.svg")
    for name in ("step.html", "step.svg"):
        drawn = (tmp_path / name).read_text()
        assert all(f"replica {r} of 3 (cpu)" in drawn for r in range(3))
        assert "SGD.step" in drawn
    assert 0 < trace.seconds < 600
    assert 0 <= trace.hidden_share <= 1
    again = mirror.Trace.load(tmp_path / "step.json")
    assert repr(again) == repr(trace)
    again.to_html(tmp_path / "again.html")
    assert (tmp_path / "again.html").read_bytes() == (tmp_path / "step.html").read_bytes()


def test_a_trace_that_is_taken_still_cannot_be_looked_at(make_strategy, tmp_path):
    with make_strategy(2).trace(tmp_path / "step.json") as trace:
        assert repr(trace) == "Trace(is being taken)"
        assert trace._repr_html_() is None
        for look in (
            lambda: trace.to_html(tmp_path / "step.html"),
            lambda: trace.to_svg(tmp_path / "step.svg"),
            lambda: trace.seconds,
            lambda: trace.hidden_share,
        ):
            with pytest.raises(mirror.StrategyError, match="after the with statement"):
                look()
    trace.to_html(tmp_path / "step.html")
    assert "nothing happened" in (tmp_path / "step.html").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step.html", "step.json"]


def test_it_tells_what_is_in_it(tmp_path):
    trace = mirror.Trace(content(STEP, hidden=0.25))
    assert repr(trace) == (
        "Trace(6 spans in 3 lanes, 0.080 ms; 25% of the reductions' time was hidden)"
    )
    assert trace.seconds == 80e-6
    assert all(name in trace._repr_html_() for name in NAMES[:3])
    assert repr(mirror.Trace(content(STEP))) == "Trace(6 spans in 3 lanes, 0.080 ms)"


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", "3", '{"traceEvents": 3}', '{"traceEvents": [{"ph": "X"}]}', "\x80"],
)
def test_a_file_without_a_trace_is_refused(tmp_path, text):
    path = tmp_path / "other.json"
    path.write_bytes(text.encode("latin1"))
    with pytest.raises(ValueError, match=r"other.json' holds no trace of a strategy"):
        mirror.Trace.load(path)


def test_a_file_that_is_not_there_is_an_error_of_the_system(tmp_path):
    with pytest.raises(FileNotFoundError):
        mirror.Trace.load(tmp_path / "gone.json")


def test_a_page_that_cannot_be_written_leaves_what_was_there(tmp_path):
    trace = mirror.Trace(content(STEP))
    with pytest.raises(FileNotFoundError):
        trace.to_html(tmp_path / "gone" / "step.html")
    with pytest.raises(OSError, match="director"):
        trace.to_svg(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("width", [299, 0, True, 880.0, "wide"])
def test_a_picture_has_a_width(tmp_path, width):
    with pytest.raises(ValueError, match="whole number from 300 on"):
        mirror.Trace(content(STEP)).to_svg(tmp_path / "step.svg", width=width)


def test_the_file_is_what_perfetto_reads_as_before(make_strategy, tmp_path):
    with make_strategy(1).trace(tmp_path / "step.json") as trace:
        pass
    assert json.loads((tmp_path / "step.json").read_text()) == trace._content
