"""Every row of the tables in docs/compiled-steps.md has a test, named in documented_rows.toml."""

import re
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found]

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "compiled-steps.md"
SECTION = "## What is compiled, and what is not"
TESTS = tomllib.loads((HERE / "documented_rows.toml").read_text())


def rows():
    """Returns the cells of each row of the section's tables, without heads."""
    section = PAGE.read_text().partition(SECTION)[2].partition("\n## ")[0]
    lines = section.splitlines()
    heads = {i for i, after in enumerate(lines[1:]) if set(after) == {"-", "|"}}
    lines = [line for i, line in enumerate(lines) if line.startswith("| ") and i not in heads]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_the_rows_are_those_that_have_tests():
    firsts = [row[0] for row in rows()]
    assert firsts == list(TESTS)


@pytest.mark.parametrize("name", sorted(set(TESTS.values())))
def test_a_test_of_a_row_exists(name):
    path, _, name = name.partition("::")
    assert re.search(rf"^def {name}\(", (HERE / path).read_text(), re.MULTILINE), name


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0][:40])
def test_a_cell_has_at_most_twenty_words(row):
    assert max(len(cell.split()) for cell in row) <= 20
