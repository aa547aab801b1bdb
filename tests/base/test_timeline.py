"""mirror/base/timeline.py: the kinds of time in a step add up to the step."""

import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

from mirror.base import timeline as module
from mirror.base.timeline import (
    BACKWARD,
    CROSS,
    EXPOSED,
    FORWARD,
    INPUT,
    OPTIMIZER,
    OVERLAPPED,
    REDUCTION,
    WAITING,
    Timeline,
)
from mirror.strategy.step_report import make_report


class Clock:
    """A clock that only moves when told."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(module, "perf_counter", lambda: self.now)


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def spend(clock, timeline, lane, kind, seconds, inner=()):
    timeline.begin(lane, kind)
    for arguments in inner:
        spend(clock, timeline, lane, *arguments)
    clock.now += seconds
    timeline.end(lane, kind)


def test_a_kind_counts_its_own_time_without_that_of_the_spans_inside(clock):
    timeline = Timeline(["replica 0"])
    spend(clock, timeline, 0, FORWARD, 1, [(BACKWARD, 2, [(WAITING, 4)]), (OPTIMIZER, 8)])
    timeline.end_step()
    ((step, lanes),) = timeline.steps
    assert step == 15
    spent = {kind: seconds for kind, seconds in lanes[0].items() if seconds}
    assert spent == {FORWARD: 1, BACKWARD: 2, WAITING: 4, OPTIMIZER: 8}


def test_a_span_that_an_error_left_open_ends_with_the_one_around_it(clock):
    timeline = Timeline(["replica 0"])
    timeline.begin(0, FORWARD)
    clock.now += 1
    timeline.begin(0, BACKWARD)
    clock.now += 2
    timeline.end(0, FORWARD)
    seconds, lanes = timeline.current_step()
    assert seconds == 3
    assert (lanes[0][FORWARD], lanes[0][BACKWARD]) == (1, 2)
    timeline.end(0, BACKWARD)  # is not open
    assert timeline.current_step()[1][0][BACKWARD] == 2
    timeline.begin(0, FORWARD)
    timeline.drop_open()
    timeline.end(0, FORWARD)
    assert timeline.current_step()[1][0][FORWARD] == 1


def test_a_report_has_medians_shares_and_what_limits_the_step(clock):
    timeline = Timeline(["replica 0", "replica 1"])
    for waiting in (30, 31, 90):
        spend(clock, timeline, CROSS, INPUT, waiting)
        for lane in (0, 1):
            spend(clock, timeline, lane, FORWARD, 2, [(BACKWARD, 4)])
        spend(clock, timeline, CROSS, REDUCTION, 1)
        spend(clock, timeline, OVERLAPPED, REDUCTION, 0)
        spend(clock, timeline, 1, OPTIMIZER, 3)
        clock.now += 5
        timeline.end_step()
    report = make_report(timeline, takes_turns=True)
    assert (report.num_steps, report.num_replicas) == (3, 2)
    assert report.step == 31 + 12 + 1 + 3 + 5
    assert (report.waiting_for_input, report.forward, report.backward) == (31, 4, 8)
    assert (report.waiting_for_reduction, report.optimizer, report.other) == (1, 3, 5)
    assert report.host_seconds == (6, 9)
    assert report.hidden_share == 0
    assert "waits for input" in report.advice
    assert "31000.000 ms   60%" in str(report)
    assert str(report).endswith(report.advice)
    assert report.to_dict()["step"] == report.step


@pytest.mark.parametrize(
    ("kind", "word"),
    [
        (INPUT, "input"),
        (REDUCTION, "reduction"),
        (EXPOSED, "reduction"),
        (OPTIMIZER, "optimizer"),
        (BACKWARD, "Forward and backward"),
        (None, "outside forward"),
    ],
)
def test_advice_follows_what_takes_most(clock, kind, word):
    timeline = Timeline(["replica 0"])
    spend(clock, timeline, 0, FORWARD, 6)
    if kind is None:
        clock.now += 5
    else:
        spend(clock, timeline, CROSS, kind, 5)
    timeline.end_step()
    assert word in make_report(timeline, takes_turns=True).advice


def test_an_overlapped_reduction_is_hidden_except_for_the_wait(clock):
    timeline = Timeline(["replica 0"])
    timeline.begin(0, BACKWARD)
    spend(clock, timeline, OVERLAPPED, REDUCTION, 6)
    timeline.end(0, BACKWARD)
    spend(clock, timeline, CROSS, EXPOSED, 2)
    spend(clock, timeline, CROSS, REDUCTION, 2)
    timeline.end_step()
    report = make_report(timeline, takes_turns=True)
    assert report.hidden_share == (6 - 2) / (6 + 2)
    assert report.waiting_for_reduction == 4


def test_what_replicas_do_at_once_counts_as_long_as_it_takes(clock):
    timeline = Timeline(["replica 0", "replica 1"])
    for lane in (0, 1):
        spend(clock, timeline, lane, FORWARD, 2)
    with timeline.counting_once(BACKWARD):
        timeline.begin(0, BACKWARD)
        timeline.begin(1, BACKWARD)
        clock.now += 6
        timeline.end(1, BACKWARD)
        clock.now += 1
        timeline.end(0, BACKWARD)
    clock.now += 3
    timeline.end_step()
    report = make_report(timeline, takes_turns=True)
    assert (report.step, report.forward, report.backward, report.other) == (14, 4, 7, 3)
    assert report.host_seconds == (9, 8)


def test_only_the_last_thousand_steps_are_kept(clock):
    timeline = Timeline(["replica 0"])
    for seconds in range(1200):
        clock.now += seconds
        timeline.end_step()
    report = make_report(timeline, takes_turns=True)
    assert report.num_steps == 1000
    assert report.step == (200 + 1199) / 2


def test_marks_are_added_up_when_asked_and_when_they_are_many(clock):
    timeline = Timeline(["replica 0"])
    spend(clock, timeline, 0, FORWARD, 1)
    assert len(timeline.marks) == 2
    assert timeline.current_step()[1][0][FORWARD] == 1
    assert not timeline.marks
    for _ in range(module.MANY_MARKS):
        spend(clock, timeline, 0, BACKWARD, 1)
    assert 0 < len(timeline.marks) <= module.MANY_MARKS + 2
    assert timeline.current_step()[1][0][BACKWARD] == module.MANY_MARKS


def test_a_report_in_a_notebook_has_the_printed_rows(clock):
    timeline = Timeline(["replica 0"])
    spend(clock, timeline, 0, FORWARD, 6, [(BACKWARD, 2)])
    clock.now += 2
    timeline.end_step()
    report = replace(make_report(timeline, takes_turns=True), worker="worker <1> of 2")
    shown = ET.fromstring(report._repr_html_())
    words = " ".join("\n".join(shown.itertext()).split())
    assert "worker <1> of 2" in words
    lines = [" ".join(line.itertext()).split() for line in shown.iter("tr")]
    assert ["whole", "step", "10,000.000", "ms", "100%"] in lines
    assert ["forward", "6,000.000", "ms", "60%"] in lines
    assert words.endswith(report.advice)
    assert len(lines) == 7
    assert shown.find("svg") is not None
