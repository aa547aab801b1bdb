"""Pages, pictures and files of traces, and the table of a report in a notebook."""

import itertools
import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mirror
from mirror.base.pictures import (
    COLOURS,
    TablePart,
    kinds_of,
    lanes_of,
    page_of,
    seconds_of,
    svg_of,
    table_of,
    ticks,
)
from mirror.base.timeline import BACKWARD, FORWARD, KINDS, OPTIMIZER, REDUCTION, WAITING
from tests.base.traces import HOSTILE, NAMES, STEP, content, span
from tests.strategy.programs import training


def make_page(spans, names=NAMES):
    lanes = lanes_of(content(spans, names)["traceEvents"])
    return page_of(lanes, title="a title", summary="a summary")


def test_the_page_shows_the_lanes_and_their_sums():
    page = make_page(STEP)
    picture = svg_of(lanes_of(content(STEP)["traceEvents"]), width=1200, stand_alone=False)
    assert picture in page
    assert "<td>0.040</td><td>0.030</td>" in page  # forward, backward of replica 0
    assert all(name in page for name in NAMES[:3])


def test_the_page_loads_nothing_and_has_no_scripts():
    page = make_page(STEP)
    assert not re.search(
        r"https?:(?!//www.w3.org/2000/svg)|url\(|@import|src=|href=|<script", page
    )
    assert "default-src 'none'" in page
    assert page.isascii()


def test_the_page_is_dark_or_light_and_always_the_same():
    assert "prefers-color-scheme: dark" in make_page(STEP)
    assert make_page(STEP) == make_page(list(reversed(STEP)))


def test_names_are_no_markup():
    page = make_page([span(0, HOSTILE, 0.0, 1.0, HOSTILE)], [HOSTILE])
    assert "<img" not in page


PARTS = [TablePart("forward", 1e-3, "#111111"), TablePart("backward", 3e-3, "#222222")]


def widths(table):
    bar = ET.fromstring(re.search(r"<svg.*?</svg>", table, re.S)[0])
    return [float(rect.get("width")) for rect in bar.iter("rect") if rect.get("fill")[0] == "#"]


def test_a_line_for_each_part_and_the_notes_below():
    table = ET.fromstring(table_of("a step", 4e-3, PARTS, ["one note", "another"]))
    lines = [" ".join(line.itertext()).split() for line in table.iter("tr")]
    assert lines == [
        ["whole", "step", "4.000", "ms", "100%"],
        ["forward", "1.000", "ms", "25%"],
        ["backward", "3.000", "ms", "75%"],
    ]
    assert "".join(table.itertext()).split("\n")[-3:-1] == ["one note", "another"]


def test_the_bar_is_shared_as_the_step_is():
    assert widths(table_of("", 4e-3, PARTS, [])) == [140, 420]
    assert widths(table_of("", 8e-3, PARTS, [])) == [70, 210]


@pytest.mark.parametrize("whole", [0.0, 1e-3])
def test_parts_that_are_more_than_the_whole_stay_in_the_bar(whole):
    # Medians need not add up; and before the first step has ended the whole is not known.
    assert sum(widths(table_of("", whole, PARTS, []))) == pytest.approx(560 if whole else 0)


def test_words_are_no_markup():
    table = table_of(HOSTILE, 1.0, [TablePart(HOSTILE, 1.0, "#111111")], [HOSTILE])
    assert "<img" not in table
    assert "".join(ET.fromstring(table).itertext()).count(HOSTILE) == 4  # one in the bar's title


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


def test_a_picture_describes_its_content(tmp_path):
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


@given(st.lists(st.tuples(TIMES, TIMES), min_size=1, max_size=30))
def test_no_two_spans_of_a_row_lie_on_each_other(times):
    # Also of spans that do not nest, as an error may leave them.
    (lane,) = lanes_of([span(0, FORWARD, begin, length) for begin, length in times])
    assert sum(map(len, lane.rows)) == len(times)
    for row in lane.rows:
        for one, later in itertools.pairwise(row):
            assert one.end <= later.begin + 2e-3


ROOT = Path(__file__).parents[2]
SVG = "{http://www.w3.org/2000/svg}"


def drawn(spans, **options):
    lanes = lanes_of(content(spans)["traceEvents"])
    return svg_of(lanes, **{"width": 800, "stand_alone": True} | options)


def test_every_span_is_drawn_to_scale_and_described():
    picture = ET.fromstring(drawn(STEP))
    spans = {g.find(f"{SVG}title").text: g.find(f"{SVG}rect") for g in picture.iter(f"{SVG}g")}
    assert len(spans) == len(STEP)
    whole = spans["forward: 80.0 us, from 0.0 us on"]
    half = spans["backward: 30.0 us, from 20.0 us on"]
    inside = spans["optimizer.step (waiting for other replicas): 7.0 us, from 61.0 us on"]
    scale = float(whole.get("width")) / 80
    assert float(half.get("width")) == pytest.approx(30 * scale, abs=0.1)
    assert float(half.get("x")) - float(whole.get("x")) == pytest.approx(20 * scale, abs=0.1)
    assert int(whole.get("y")) < int(half.get("y")) < int(inside.get("y"))
    words = [text.text for text in picture.iter(f"{SVG}text")]
    assert {"replica 0 of 2 (cpu)", "replica 1 of 2 (cpu)", "0 us", "forward"} <= set(words)


def test_of_thousands_of_spans_no_more_are_drawn_than_can_be_seen():
    spans = [span(i % 2, FORWARD, 10.0 * i, 19.0) for i in range(10_000)]
    picture = ET.fromstring(drawn(spans))
    rects = [g.find(f"{SVG}rect") for g in picture.iter(f"{SVG}g")]
    assert 2 * 500 < len(rects) < 2 * 800
    ends = [float(rect.get("x")) + float(rect.get("width")) for rect in rects]
    assert max(ends) == pytest.approx(788, abs=1)


def test_words_of_a_picture_are_no_markup():
    picture = drawn([span(0, HOSTILE, 0.0, 10.0, HOSTILE)])
    assert "<img" not in picture
    assert HOSTILE in [text.text for text in ET.fromstring(picture).iter(f"{SVG}text")]


def test_a_picture_of_a_page_has_its_colours_and_a_file_has_its_own():
    assert "prefers-color-scheme" in drawn(STEP)
    assert "<style" not in drawn(STEP, stand_alone=False)


def test_a_trace_of_nothing_says_so():
    assert "nothing happened" in "".join(ET.fromstring(drawn([])).itertext())


def test_everything_stays_inside():
    spans = [span(i % 4, FORWARD, 1e3 * i, 900.0) for i in range(200)]
    for width in (300, 880):
        picture = ET.fromstring(drawn(spans, width=width))
        for rect in picture.iter(f"{SVG}rect"):
            if rect.get("class") is None:
                assert float(rect.get("x")) + float(rect.get("width")) <= width
                assert float(rect.get("y")) + float(rect.get("height")) <= float(
                    picture.get("height")
                )


@pytest.mark.parametrize("whole", [1e-9, 0.3, 7.0, 10.0, 99.9, 147_487.0, 3e9])
def test_ticks_are_few_and_round(whole):
    marks = ticks(whole, 8)
    assert 2 <= len(marks) <= 9
    assert marks[0] == 0
    assert marks[-1] <= whole * (1 + 1e-9)
    assert re.fullmatch(r"[125]e[+-]\d+", f"{marks[1]:.0e}")


def test_the_picture_of_the_documents_is_what_is_drawn_of_its_trace(tmp_path):
    import mirror

    kept = ROOT / "docs" / "pictures"
    mirror.Trace.load(kept / "two_lanes.json").to_svg(tmp_path / "drawn.svg")
    assert (tmp_path / "drawn.svg").read_bytes() == (kept / "two_lanes.svg").read_bytes()
