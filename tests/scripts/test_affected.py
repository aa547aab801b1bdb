"""The tests that a change calls for, and mutants: found over a small tree of its own."""

import ast
import builtins
import json
import os
import subprocess
import sys

import pytest

from tests.scripts.affected import changes, chart, choice
from tests.scripts.affected.chart import Chart
from tests.scripts.affected.marked import ROOT, functions, mark
from tests.scripts.affected.record import drawn
from tests.scripts.mutants.making import mutants_of

SHAPES = '''"""What it is."""

import functools


def said(x):
    """It is said."""
    return x + 1


def plain(x): return x * 2


def block(x):
    for i in range(x):
        if i:
            return i
    return None


def decorated():
    @functools.cache
    def inner(y):
        return y - 1
    return inner


class Kind:
    def documented(self):
        """Nothing else."""

    def generator(self):
        value = (
            yield 1
        )
        yield value

    async def later(self):
        with open("x"): pass
'''


@pytest.fixture
def tree(tmp_path):
    """A repository of one commit on main, with two files of code and their tests."""
    for name, text in {
        "mirror/__init__.py": '"""A package."""\n\nfrom mirror import a\n',
        "mirror/a.py": SHAPES,
        "mirror/deep/b.py": '"""B."""\n\nX = 1\n\n\ndef f():\n    return X\n',
        "tests/shared_thing.py": "Y = 1\n",
        "tests/conftest.py": "",
        "tests/test_a.py": "import mirror.a\n",
        "tests/deep/conftest.py": "",
        "tests/deep/test_b.py": "from tests import shared_thing\n",
        "tests/deep/test_c.py": "from tests.deep.between import Z\n",
        "tests/deep/between.py": "from tests.shared_thing import Y as Z\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    of = ["-c", "user.name=n", "-c", "user.email=e", "-c", "commit.gpgsign=false"]
    for arguments in (["init", "-q", "-b", "main"], ["add", "."], [*of, "commit", "-qm", "x"]):
        changes.git(*arguments, root=tmp_path)
    return tmp_path


CHART = Chart(
    {"tests/test_a.py": 2.0, "tests/deep/test_b.py": 1.0, "tests/deep/test_c.py": 50.0},
    {
        "mirror/a.py:said": frozenset(["tests/test_a.py", "tests/deep/test_c.py"]),
        "mirror/a.py:plain": frozenset(["tests/test_a.py"]),
        "mirror/a.py:Kind.later": frozenset(["tests/deep/test_c.py"]),
        "mirror/deep/b.py:f": frozenset(
            CHART_FILES := ["tests/test_a.py", "tests/deep/test_b.py", "tests/deep/test_c.py"]
        ),
    },
)


def test_a_marked_copy_does_the_same_and_tells_what_has_run(tree, monkeypatch):
    names = mark(tree)
    assert names[:4] == [f"mirror/a.py:{n}" for n in ("said", "plain", "block", "decorated")]
    assert "mirror/a.py:decorated.inner" in names
    text = (tree / "mirror/a.py").read_text()
    at = {name: node.lineno for name, node in functions(ast.parse(text))}
    assert at["block"] == 15 - 1
    monkeypatch.setattr(builtins, "__hits__", hits := bytearray(len(names)), raising=False)
    module = {}
    exec(compile(text, "a.py", "exec"), module)
    assert module["said"].__doc__ == "It is said."
    assert not any(hits)
    calls = {
        "said": lambda: module["said"](1) == 2,
        "plain": lambda: module["plain"](2) == 4,
        "block": lambda: module["block"](3) == 1,
        "decorated": lambda: callable(module["decorated"]()),
        "Kind.documented": lambda: module["Kind"]().documented() is None,
        "Kind.generator": lambda: list(module["Kind"]().generator()) == [1, None],
    }
    for name, call in calls.items():
        hits[:] = bytes(len(names))
        assert call()
        assert [n for n, hit in zip(names, hits, strict=True) if hit] == [f"mirror/a.py:{name}"]


def test_processes_of_a_test_are_seen(tree):
    num = len(mark(tree))
    (tree / "hits").write_bytes(bytes(num))
    program = "import os, mirror\nif not os.fork(): mirror.a.said(1)\nelse: os.wait()"
    environ = {**os.environ, "MIRROR_TEST_HITS": str(tree / "hits"), "PYTHONPATH": str(tree)}
    subprocess.run([sys.executable, "-c", program], env=environ, cwd=tree, check=True)
    assert (tree / "hits").read_bytes() == bytes([1, *bytes(num - 1)])


def test_a_chart_is_read_as_it_was_written():
    read = chart.loaded(CHART.saved())
    assert (read.seconds, read.runs) == (CHART.seconds, CHART.runs)
    assert read.saved() == CHART.saved()


def test_the_chart_that_is_kept_is_of_this_tree():
    """Not the newest, perhaps, but most of what it names is there."""
    kept = chart.loaded(chart.PATH.read_text())
    there = [file for file in kept.seconds if (ROOT / file).exists()]
    assert len(there) > 0.8 * len(kept.seconds) > 100
    assert {file.split("::")[0] for tests in kept.runs.values() for file in tests} <= set(
        kept.seconds
    )


def test_what_a_chart_does_not_know_is_looked_up_as_its_surroundings():
    every = frozenset(CHART_FILES)
    assert CHART.tests_of("mirror/a.py:new") == {"tests/test_a.py", "tests/deep/test_c.py"}
    assert CHART.tests_of("mirror/deep/new.py:g") == every - {"tests/test_a.py"}


def test_a_record_replaces_what_was_known_of_its_tests():
    names = list(CHART.runs)
    lines = [
        json.dumps(["", 9.0, 1, [0, 1, 2, 3]]),
        json.dumps(["tests/test_a.py::test_x[1]", 1.0, 5, [1]]),
        json.dumps(["tests/test_a.py::test_x[3]", 0.5, 5, [2]]),
    ]
    found = drawn(CHART, names, lines)
    assert found.seconds == {**CHART.seconds, "tests/test_a.py": 3.0}
    assert found.runs["mirror/a.py:said"] == {"tests/deep/test_c.py"}
    assert found.runs["mirror/a.py:plain"] == {"tests/test_a.py"}
    assert found.runs["mirror/a.py:Kind.later"] == {"tests/test_a.py", "tests/deep/test_c.py"}


def test_lines_are_in_the_innermost_function():
    tree = ast.parse(SHAPES)
    lines = SHAPES.splitlines()
    at = {text.strip(): number for number, text in enumerate(lines, 1)}
    assert changes.names_at(tree, [at["return y - 1"]]) == ["decorated.inner"]
    assert changes.names_at(tree, [at["@functools.cache"]]) == ["decorated.inner"]
    assert changes.names_at(tree, [at["return inner"], at["import functools"]]) == [
        "",
        "decorated",
    ]
    assert changes.names_at(tree, [at["yield value"]]) == ["Kind.generator"]


def test_changes_are_found_in_commits_and_in_what_is_not_committed(tree):
    base = changes.base_of(tree)
    changes.git("checkout", "-qb", "branch", root=tree)
    a = tree / "mirror/a.py"
    a.write_text(SHAPES.replace("x + 1", "x + 2"))
    of = ["-c", "user.name=n", "-c", "user.email=e", "-c", "commit.gpgsign=false"]
    changes.git(*of, "commit", "-qam", "y", root=tree)
    a.write_text(a.read_text().replace("x * 2", "x * 3"))
    (tree / "mirror/new.py").write_text("def g():\n    pass\n")
    (tree / "mirror/deep/b.py").unlink()
    assert changes.base_of(tree) == base
    files = ["mirror/a.py", "mirror/deep/b.py", "mirror/new.py"]
    assert changes.changed_files(tree, base) == files
    found = {file: list(changes.changed_functions(tree, base, file)) for file in files}
    assert found == {
        "mirror/a.py": ["mirror/a.py:plain", "mirror/a.py:said"],
        "mirror/deep/b.py": ["mirror/deep/b.py:"],
        "mirror/new.py": ["mirror/new.py:g"],
    }
    assert changes.base_of(tree, "no-such-branch") == "HEAD"


def test_lines_taken_out_are_a_change_of_what_was_around_them(tree):
    a = tree / "mirror/a.py"
    a.write_text(SHAPES.replace("        if i:\n            return i\n", "        pass\n"))
    assert list(changes.changed_functions(tree, "HEAD", "mirror/a.py")) == ["mirror/a.py:block"]
    a.write_text(SHAPES.replace("    return None\n", "", 1))
    assert "mirror/a.py:block" in changes.changed_functions(tree, "HEAD", "mirror/a.py")


@pytest.mark.parametrize(
    ("changed", "tests"),
    [
        (["mirror/a.py"], ["tests/test_a.py"]),
        (["mirror/deep/b.py"], ["tests/deep/test_b.py"]),
        (["tests/shared_thing.py"], ["tests/deep/test_b.py", "tests/deep/test_c.py"]),
        (["tests/deep/between.py"], ["tests/deep/test_c.py"]),
        (["tests/deep/conftest.py"], ["tests/deep/test_b.py", "tests/deep/test_c.py"]),
        (["tests/conftest.py"], []),
        (["tests/test_a.py", "tests/test_gone.py"], ["tests/test_a.py"]),
        (["README.md"], []),
    ],
)
def test_a_changed_file_names_its_tests(changed, tests, tree):
    assert choice.must_run(changed, tree) == tests


def test_everything_elsewhere_names_tests_that_exist():
    named = {test for tests in choice.ELSEWHERE.values() for test in tests}
    missing = [test for test in {*named, *choice.ALWAYS} if not (ROOT / test).exists()]
    assert missing == []
    assert [place for place in choice.ELSEWHERE if not (ROOT / place).exists()] == []


def test_what_few_files_run_tells_more_and_what_is_dear_comes_last():
    order = choice.may_run(["mirror/a.py:said", "mirror/a.py:plain"], CHART)
    assert order == ["tests/test_a.py", "tests/deep/test_c.py"]
    assert choice.within([], order, CHART.seconds, 10.0) == (order[:1], order[1:])
    assert choice.within([], order, CHART.seconds, 99.0) == (order, [])
    assert choice.within(["tests/deep"], order, CHART.seconds, 99.0)[0] == ["tests/deep", order[0]]
    assert choice.within(order[1:], [], CHART.seconds, 1.0) == (order[1:], [])


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
    told = {(m.was, m.now) for m in found}
    assert told == {
        ("1", "2"),
        ("a < b and (not a)".replace("(not a)", "not a"), "(not (a < b and (not a)))"),
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
