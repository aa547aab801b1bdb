"""trace_lanes.py: spans in the rows of those around them, and what each took itself."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from mirror.base.timeline import BACKWARD, FORWARD, KINDS, OPTIMIZER, REDUCTION, WAITING
from mirror.viewer.trace_lanes import COLOURS, kinds_of, lanes_of, seconds_of
from tests.viewer.made import STEP, content, span


def test_every_kind_has_a_colour_of_its_own():
    assert set(COLOURS) == set(KINDS)
    assert len(set(COLOURS.values())) == len(KINDS)


def test_spans_are_below_those_they_are_in_and_begin_at_0():
    lanes = lanes_of(content(STEP)["traceEvents"])
    assert [lane.name for lane in lanes] == [
        "replica 0 of 2 (cpu)",
        "replica 1 of 2 (cpu)",
        "cross-replica context",
    ]
    rows = [[(s.kind, s.begin, s.length, s.own) for s in row] for row in lanes[0].rows]
    assert rows == [
        [(FORWARD, 0.0, 80.0, 40.0)],
        [(BACKWARD, 20.0, 30.0, 30.0), (OPTIMIZER, 60.0, 10.0, 3.0)],
        [(WAITING, 61.0, 7.0, 7.0)],
    ]
    assert lanes[0].own_by_kind() == {FORWARD: 40, BACKWARD: 30, OPTIMIZER: 3, WAITING: 7}
    assert kinds_of(lanes) == [FORWARD, BACKWARD, REDUCTION, OPTIMIZER, WAITING]
    assert seconds_of(lanes) == 80e-6


def test_a_trace_of_nothing_has_no_lanes():
    assert lanes_of(content([])["traceEvents"]) == ()
    assert seconds_of(()) == 0


def test_what_another_version_has_written_has_a_place_too():
    lanes = lanes_of([span(7, "of another version", 5.0, 1.0)])
    assert [lane.name for lane in lanes] == ["lane 7"]
    assert kinds_of(lanes) == ["of another version"]
    assert lanes[0].own_by_kind() == {"of another version": 1.0}


TIMES = st.floats(0, 1e6, allow_nan=False)


@settings(deadline=None)
@given(st.lists(st.tuples(TIMES, TIMES), min_size=1, max_size=30))
def test_no_two_spans_of_a_row_lie_on_each_other(times):
    # Also of spans that do not nest, as an error may leave them.
    (lane,) = lanes_of([span(0, FORWARD, begin, length) for begin, length in times])
    assert sum(map(len, lane.rows)) == len(times)
    for row in lane.rows:
        for one, later in itertools.pairwise(row):
            assert one.end <= later.begin + 2e-3
