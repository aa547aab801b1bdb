"""mirror/viewer/svg_lanes.py: a picture that is well-formed, to scale, and always the same."""

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from mirror.base.timeline import FORWARD
from mirror.viewer.svg_lanes import svg_of, ticks
from mirror.viewer.trace_lanes import lanes_of
from tests.viewer.made import HOSTILE, STEP, content, span

ROOT = Path(__file__).parents[2]
SVG = "{http://www.w3.org/2000/svg}"


def drawn(spans, **options):
    lanes = lanes_of(content(spans)["traceEvents"])
    return svg_of(lanes, **{"width": 800, "stand_alone": True} | options)


def test_every_span_is_drawn_to_scale_and_told_in_words():
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


def test_words_are_no_markup():
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
