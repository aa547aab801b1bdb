"""docs/architecture.md names files and notes that are there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
NOTES = re.findall(r"`(\[Note: [^]]+\])`(?: and `(\[Note: [^]]+\])`)?\s+in\s+`([\w/]+\.py)`", PAGE)


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`((?:\w+/)+\w+\.py)`", PAGE))))
def test_a_file_is_where_the_page_says(name):
    assert (ROOT / "mirror" / name).exists() or (ROOT / name).exists()


def test_a_note_is_where_the_page_says():
    assert len(NOTES) > 20
    missing = [
        (note, name)
        for *notes, name in NOTES
        for note in notes
        if note and f"\n{note}\n" not in re.sub("\n +", "\n", (ROOT / "mirror" / name).read_text())
    ]
    assert missing == []


def test_the_picture_shows_every_folder():
    folders = {path.parent.name for path in (ROOT / "mirror").rglob("*.py")} - {"mirror"}
    assert {name for name in folders if f"{name}/" not in PAGE} == set()
