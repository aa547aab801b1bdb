"""mirror/viewer/html_table.py: what a notebook shows of a report."""

import re
import xml.etree.ElementTree as ET

import pytest

from mirror.viewer.html_table import TablePart, table_of
from tests.viewer.made import HOSTILE

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
