"""Mutants of a small tree: which are drawn, what comes of each, and the table."""

import json
import subprocess
import sys

import pytest

from tests.scripts.affected.marked import ROOT
from tests.scripts.mutants.making import mutants_of, spread
from tests.scripts.mutants.outcomes import (
    EQUIVALENT,
    FOUND,
    LASTED,
    MISSED,
    Outcomes,
    Result,
    reasons,
)
from tests.scripts.mutants.page import page

CODE = """
def counted(items):
    number = 0
    for _ in items:
        number += 1
    return number


def until(end):
    while True:
        end += 1
        if end >= 3:
            break
    return end


def unseen(a):
    return a + 1
"""
TESTS = """
import pytest

import mirror
from mirror.code import counted, until


@pytest.mark.parametrize("n", [7, 0, 2])
def test_counted(n):
    assert counted(range(n)) == n


def test_until():
    assert until(1) == 3


def test_that_fails_anyway():
    assert counted([]) == "nothing"
"""


@pytest.fixture
def known(monkeypatch):
    """Gives ``known(text)``: outcomes that know these mutants as no faults."""

    def make(text="", path=None):
        outcomes = Outcomes(path)
        monkeypatch.setattr(outcomes, "equivalent", reasons(text))
        return outcomes

    return make


PROGRAM = """
import json, sys
from pathlib import Path
from tests.scripts.mutants import trying
from tests.scripts.mutants.making import mutants_of

def copy(to):
    for name, text in files.items():
        (to / name).parent.mkdir(exist_ok=True)
        (to / name).write_text(text)

files, asked, wall, folder = json.loads(sys.stdin.read())
trying.copy_tree, trying._prepare = copy, lambda: None
code = files["mirror/code.py"]
every = {f"{m.was} -> {m.now}": m for m in mutants_of("mirror/code.py", code)}
trials = [trying.Trial(every[name], [test]) for name, test in asked]
for trial, result in trying.try_all(trials, Path(folder), 2, trying.Limits(60.0, wall)):
    print(json.dumps([f"{trial.mutant.was} -> {trial.mutant.now}", result.outcome, result.by]))
"""


def tried(folder, asked, wall):
    """Returns what comes of mutants, each with a test, in a process that has no torch."""
    files = {"mirror/__init__.py": "", "mirror/code.py": CODE, "tests/test_code.py": TESTS}
    tests = [(name, f"tests/test_code.py::{test}") for name, test in asked.items()]
    told = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps([files, tests, wall, str(folder)]),
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert told.stderr == ""
    came = {}
    for line in told.stdout.splitlines():
        name, outcome, by = json.loads(line)
        came.setdefault(name, []).append((outcome, by.removeprefix("tests/test_code.py::")))
    return came


def test_what_comes_of_mutants(tmp_path):
    asked = {
        "return number -> return None": "test_counted",
        "a + 1 -> (a - 1)": "test_until",
        "3 -> 4": "test_that_fails_anyway",
    }
    assert tried(tmp_path, asked, wall=120.0) == {
        # The middle case is the first.
        "return number -> return None": [(FOUND, "test_counted[0]")],
        "a + 1 -> (a - 1)": [(MISSED, "by 1 tests of 1 files")],
        "3 -> 4": [
            (FOUND, "test_that_fails_anyway"),
            (MISSED, "test_that_fails_anyway fails without it, too"),
        ],
    }
    for tree in ("0", "1"):
        assert (tmp_path / tree / "mirror/code.py").read_text() == CODE


def test_what_does_not_end_is_ended(tmp_path):
    ((outcome, _),) = tried(tmp_path, {"break -> continue": "test_until"}, wall=1.0).popitem()[1]
    assert outcome == LASTED


def test_every_file_has_its_share_and_a_change_elsewhere_draws_the_same():
    text = "def f(a):\n" + "    a = a + a\n" * 20
    files = {"large.py": text, "small.py": text[: text.index("\n", 60) + 1]}
    every = [mutant for file, text in files.items() for mutant in mutants_of(file, text)]
    drawn = spread(every, len(every) // 2, seed=1)
    for file in files:
        of_file, of_drawn = (sum(m.file == file for m in each) for each in (every, drawn))
        assert abs(of_drawn - of_file / 2) <= 1
    assert drawn == spread(every, len(every) // 2, seed=1)
    assert drawn != spread(every, len(every) // 2, seed=2)
    longer = [m for f, t in files.items() for m in mutants_of(f, f"import os\n\n{t}")]
    again = spread(longer, len(every) // 2, seed=1)
    assert [mutant.name for mutant in again] == [mutant.name for mutant in drawn]


def test_what_a_person_reads_has_no_mutants():
    text = """
def said(a) -> str:
    return "none at all" if a == 1 else f"{a + 1} of them"

def warns(a):
    assert a > 1
    return w("one" if a > 1 else "many", stacklevel=2)

def chosen(a) -> str:
    return "sum" if a else g("mean")
"""
    told = {f"{m.was} -> {m.now}" for m in mutants_of("f.py", text)}
    assert {each for each in told if not each.startswith("return")} == {"a -> (not a)"}


def test_a_condition_and_its_opposite_are_one_mutant():
    text = "def f(a):\n    if a == 1 and b:\n        pass\n    while not a:\n        pass\n"
    told = [f"{m.was} -> {m.now}" for m in mutants_of("f.py", text)]
    assert sorted(told) == [
        "1 -> 2",
        "a == 1 -> (a != 1)",
        "a == 1 and b -> (a == 1 or b)",
        "a == 1 and b -> (not (a == 1 and b))",
        "not a -> (a)",
    ]
    text = "def f(a):\n    if a == 1:\n        pass\n"
    assert [m.now for m in mutants_of("f.py", text)] == ["(a != 1)", "2"]


def test_outcomes_are_kept_and_only_what_was_missed_is_tried_again(known, tmp_path):
    path = tmp_path / "kept"
    outcomes = known("no fault\n    why", path)
    for name, outcome in [("a", FOUND), ("b", MISSED), ("c", LASTED), ("d", MISSED), ("d", FOUND)]:
        outcomes.note(name, Result(outcome, "by a test"))
    again = known("no fault\n    why", path)
    tried = [name for name in ("a", "b", "c", "d", "new", "no fault") if again.to_try(name)]
    assert tried == ["b", "new"]
    assert (again.first["d"].outcome, again.last["d"].outcome) == (MISSED, FOUND)


def test_the_page_counts_by_folder_and_says_why_some_are_no_faults(known):
    mutants = [m for file in ("mirror/a/x.py", "mirror/a/b/y.py") for m in mutants_of(file, CODE)]
    same, missed, since, lasted = (mutant.name for mutant in mutants[:4])
    outcomes = known(f"# a comment\n\n{same}\n    nobody sees\n    it\n")
    outcomes.note(missed, Result(MISSED, ""))
    outcomes.note(since, Result(MISSED, ""))
    outcomes.note(since, Result(FOUND, ""))
    outcomes.note(lasted, Result(LASTED, ""))
    outcomes.note(mutants[-1].name, Result(FOUND, ""))
    text = page(mutants, outcomes, ["mirror/a", "--outcomes", "place", "--seed", "1"])
    assert "python -m tests.scripts.mutants mirror/a --seed 1\n" in text
    assert "| `mirror/a/` | 4 | 1 | 1 | 1 | 67% | 1 | 1 |" in text
    assert "| `mirror/a/b/` | 1 | 0 | 1 | 0 | 100% | 0 | 0 |" in text
    assert "| **all** | 5 | 1 | 2 | 1 | 75% | 1 | 1 |" in text
    assert f"## Not found\n\n- `{missed}`\n" in text
    assert f"- `{same}`: nobody sees it" in text
    assert f"Of {len(mutants)} drawn 5 have been tried." in text


def test_what_is_said_to_be_no_fault_has_a_reason_and_exists():
    told = reasons(EQUIVALENT.read_text())
    assert [name for name, reason in told.items() if not reason] == []
    files = {name.split(":")[0] for name in told}
    existing = {m.name for file in files for m in mutants_of(file, (ROOT / file).read_text())}
    assert sorted(told.keys() - existing) == []
