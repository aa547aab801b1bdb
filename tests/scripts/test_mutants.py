"""Mutants of a small tree: which are drawn, the outcome of each, and the table."""

import ast

import pytest

from tests.pairs import EXHAUSTIVE
from tests.scripts.affected import ROOT
from tests.scripts.mutants import __main__ as mutants
from tests.scripts.mutants.__main__ import EQUIVALENT, FOUND, MISSED, TIMEOUT, reasons, table
from tests.scripts.mutants.mutations import mutants_of, spread

pytestmark = list(EXHAUSTIVE)  # of a tool for developers

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
def try_each(tmp_path, monkeypatch):
    """Gives ``try_each({"2 -> 3": "test_f"}, limit)``: the outcomes of mutants, each by a test."""

    def copy(to):
        files = {"mirror/code.py": CODE, "tests/test_code.py": TESTS, "mirror/__init__.py": ""}
        plugin = "tests/scripts/mutants/limits.py"
        for name, text in {**files, plugin: (ROOT / plugin).read_text()}.items():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            (to / name).write_text(text)

    def call(tests, limit):
        every = {f"{m.was} -> {m.now}": m for m in mutants_of("mirror/code.py", CODE)}
        trials = [(every[name], [f"tests/test_code.py::{t}"]) for name, t in tests.items()]
        outcomes = {}
        for mutant, (outcome, by) in mutants.try_all(trials, 2, 60.0, limit):
            name = f"{mutant.was} -> {mutant.now}"
            outcomes.setdefault(name, []).append(
                (outcome, by.removeprefix("tests/test_code.py::"))
            )
        return outcomes

    monkeypatch.setattr(mutants, "copy_tree", copy)
    return call


def test_a_mutant_is_found_by_a_test_that_fails_only_with_it(try_each):
    tests = {
        "return number -> return None": "test_counted",
        "a + 1 -> (a - 1)": "test_until",
        "3 -> 4": "test_that_fails_anyway",
    }
    assert try_each(tests, limit=120.0) == {
        # The middle case is the first.
        "return number -> return None": [(FOUND, "test_counted[0]")],
        "a + 1 -> (a - 1)": [(MISSED, "")],
        "3 -> 4": [
            (FOUND, "test_that_fails_anyway"),
            (MISSED, "test_that_fails_anyway also fails without it"),
        ],
    }


def test_a_test_that_does_not_end_is_killed(try_each):
    assert try_each({"break -> continue": "test_until"}, limit=1.0) == {
        "break -> continue": [(TIMEOUT, "")]
    }


def test_mutants_differ_in_one_place_and_are_code():
    text = '''"""What it is."""


def f(a, b=1):
    """Says so."""
    if a < b and not a:
        g(a)
        raise ValueError(f"no {a + 1}")
    for c in a:
        continue
    return a + b


def outer():
    def inner():
        return 5
    return inner


def __repr__(self):
    return 1 + 1
'''
    found = list(mutants_of("f.py", text))
    assert {(m.was, m.now) for m in found} == {
        ("1", "2"),
        ("a < b and not a", "(not (a < b and (not a)))"),
        ("a < b and not a", "(a < b or not a)"),
        ("a < b", "(a <= b)"),
        ("not a", "(a)"),
        ("g(a)", "pass"),
        ("continue", "break"),
        ("return a + b", "return None"),
        ("a + b", "(a - b)"),
        ("5", "6"),
        ("return 5", "return None"),
        ("return inner", "return None"),
    }
    names = {"5": "outer.inner", "return 5": "outer.inner", "return inner": "outer"}
    for mutant in found:
        ast.parse(mutant.text)
        assert mutant.text != text
        assert text.replace(mutant.was, mutant.now, 1) != text
        assert mutant.function == names.get(mutant.was, "f")


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


def test_texts_for_people_have_no_mutants():
    text = """
def said(a) -> str:
    return "none at all" if a == 1 else f"{a + 1} of them"

def warns(a):
    assert a > 1
    return w("one" if a > 1 else "many", stacklevel=2)

def chosen(a) -> str:
    return "sum" if a else g("mean")
"""
    found = {f"{m.was} -> {m.now}" for m in mutants_of("f.py", text)}
    assert {each for each in found if not each.startswith("return")} == {"a -> (not a)"}


def test_a_condition_and_its_opposite_are_one_mutant():
    text = "def f(a):\n    if a == 1 and b:\n        pass\n    while not a:\n        pass\n"
    found = [f"{m.was} -> {m.now}" for m in mutants_of("f.py", text)]
    assert sorted(found) == [
        "1 -> 2",
        "a == 1 -> (a != 1)",
        "a == 1 and b -> (a == 1 or b)",
        "a == 1 and b -> (not (a == 1 and b))",
        "not a -> (a)",
    ]
    text = "def f(a):\n    if a == 1:\n        pass\n"
    assert [m.now for m in mutants_of("f.py", text)] == ["(a != 1)", "2"]


def test_outcomes_are_kept_and_the_last_one_counts(tmp_path):
    path = tmp_path / "kept"
    path.write_text('["a", ["missed", ""]]\n["b", ["found", "t"]]\n["a", ["found", "u"]]\n')
    assert mutants.load(path) == {"a": (FOUND, "u"), "b": (FOUND, "t")}
    assert mutants.load(tmp_path / "none") == {}


def test_the_table_counts_by_folder_and_names_what_no_test_finds():
    every = [m for file in ("mirror/a/x.py", "mirror/a/b/y.py") for m in mutants_of(file, CODE)]
    same, missed, lasted = (mutant.name for mutant in every[:3])
    outcomes = {missed: (MISSED, ""), lasted: (TIMEOUT, ""), every[-1].name: (FOUND, "")}
    text = "\n".join(table(every, outcomes, reasons(f"# a comment\n\n{same}\n    why\n    it\n")))
    assert "| `mirror/a/` | 3 | 1 | 0 | 1 | 50% | 1 |" in text
    assert "| `mirror/a/b/` | 1 | 0 | 1 | 0 | 100% | 0 |" in text
    assert "| **all** | 4 | 1 | 1 | 1 | 67% | 1 |" in text
    assert f"\n- not found: `{missed}`" in text


def test_every_equivalent_mutant_exists_and_has_a_reason():
    known = reasons(EQUIVALENT.read_text())
    assert [name for name, reason in known.items() if not reason] == []
    files = {name.split(":")[0] for name in known}
    existing = {m.name for file in files for m in mutants_of(file, (ROOT / file).read_text())}
    assert sorted(known.keys() - existing) == []
