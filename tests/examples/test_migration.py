"""The tables of docs/from-*.md name what there is here, under its name."""

import re
from operator import attrgetter

import pytest

import mirror
import mirror.server
from tests.examples.pages import ROOT

PAGES = {page.stem: page.read_text() for page in sorted((ROOT / "docs").glob("from-*.md"))}
ROWS = {page: re.findall(r"^\| (.*?) \| (.*) \|$", text, re.M) for page, text in PAGES.items()}
# A name with its path, in code; what is called ends at the parenthesis.
NAMES = sorted(
    {
        name
        for rows in ROWS.values()
        for _, here in rows
        for name in re.findall(r"`((?:mirror|strategy|ReplicaContext)\.[\w.]+)", here)
    }
)
ROOTS = {
    "mirror": mirror,
    "strategy": mirror.MirroredStrategy,
    "ReplicaContext": mirror.ReplicaContext,
}


@pytest.mark.parametrize("name", NAMES)
def test_a_name_of_the_table_is_there(name):
    if name.startswith("mirror.lightning"):
        pytest.importorskip("lightning")
    first, _, rest = name.partition(".")
    owner, _, last = rest.rpartition(".")
    owner = attrgetter(owner)(ROOTS[first]) if owner else ROOTS[first]
    assert hasattr(owner, last) or last in getattr(owner, "__annotations__", ())


def test_sixty_names_stand_side_by_side():
    assert len(ROWS["from-tf-distribute"]) >= 60
