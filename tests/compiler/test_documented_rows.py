"""Every row of the tables in docs/compiled-steps.md names a test, which exists."""

import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "compiled-steps.md"
SECTION = "## What is compiled, and what is not"


def rows():
    """Returns the cells of each row of the section's tables, without heads."""
    section = PAGE.read_text().partition(SECTION)[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return [row for row in cells if row[-1] != "test" and not set(row[0]) <= {"-", "|"}]


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0][:40])
def test_a_row_names_a_test(row):
    path, _, name = row[-1].strip("`").partition("::")
    assert re.search(rf"^def {name}\(", (HERE / path).read_text(), re.MULTILINE), row[-1]


def test_all_three_tables_are_read():
    firsts = [row[0] for row in rows()]
    for words in ("one trace for batches", "the first call", "calls `merge_call`"):
        assert any(words in first for first in firsts), words


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0][:40])
def test_a_cell_has_at_most_twenty_words(row):
    assert max(len(cell.split()) for cell in row) <= 20
