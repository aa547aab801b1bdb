"""Tells what share of mutants the tests find: python -m tests.scripts.mutants mirror/execution ...

A mutant is the code with one operator, condition, constant, call or result changed. A sample of
them is drawn; of each the tests that run its function are run, those first that ``make affected``
would run first, until one fails. What none finds is printed: a hole in the tests, or no
difference that anyone could see. Every mutant runs in a fork of this process, which has torch.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.scripts.affected import chart, choice
from tests.scripts.affected.marked import ROOT, copy_tree
from tests.scripts.mutants.making import Mutant, mutants_of

FOUND, LASTED, SURVIVED = "found", "lasted", "survived"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.scripts.mutants", description=__doc__)
    parser.add_argument("places", nargs="+", help="files or folders of mirror/")
    parser.add_argument("--sample", type=int, default=50, help="how many mutants, in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=60.0, help="of tests for a mutant")
    parser.add_argument("--limit", type=float, default=300.0, help="of wall time, for a mutant")
    told = parser.parse_args()
    drawn = sample(told.places, told.sample, told.seed)
    known = chart.loaded(chart.PATH.read_text())
    import torch  # noqa: F401  # so that the forks have it

    counts: dict[str, Counter[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        copy_tree(tree)
        for mutant in drawn:
            outcome = tried(mutant, tests_of(mutant, known, told.seconds), tree, told.limit)
            counts.setdefault("/".join(mutant.file.split("/")[:2]), Counter())[outcome] += 1
            was, now = (" ".join(each.split()) for each in (mutant.was, mutant.now))
            print(f"{outcome:8} {mutant.file}:{mutant.line} {was}  ->  {now}", flush=True)
    print(table(counts))
    return 0


def sample(places: Sequence[str], size: int, seed: int) -> list[Mutant]:
    """Returns so many mutants of files and folders, drawn evenly from all."""
    paths = [
        path
        for place in map(ROOT.joinpath, places)
        for path in ([place] if place.is_file() else place.rglob("*.py"))
    ]
    files = sorted({path.relative_to(ROOT).as_posix() for path in paths})
    every = [mutant for file in files for mutant in mutants_of(file, (ROOT / file).read_text())]
    return random.Random(seed).sample(every, min(size, len(every)))


def tests_of(mutant: Mutant, known: chart.Chart, seconds: float) -> list[str]:
    """Returns the tests for a change there, as ``make affected`` chooses them, by path."""
    named = [test for test in choice.namesakes(mutant.file, ROOT) if test in known.seconds]
    may = choice.may_run([f"{mutant.file}:{mutant.function}"], known)
    return choice.within(named, may, known.seconds, seconds)[0]


def tried(mutant: Mutant, tests: Sequence[str], tree: Path, limit: float) -> str:
    """Runs tests over a tree with one mutant; the tree is as before afterwards."""
    path = tree / mutant.file
    text = path.read_text()
    path.write_text(mutant.text)
    try:
        code = _forked(tests, tree, limit)
    finally:
        path.write_text(text)
    if code is None:
        return LASTED
    return FOUND if code else SURVIVED


def _forked(tests: Sequence[str], tree: Path, limit: float) -> int | None:
    """Returns the exit code of pytest in a fork; None if it had to be killed."""
    process = os.fork()
    if process == 0:
        os.setsid()
        os._exit(_tested(tests, tree))
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        done, status = os.waitpid(process, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.killpg(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return None


def _tested(tests: Sequence[str], tree: Path) -> int:
    with open(os.devnull, "r+b") as nothing:
        for descriptor in range(3):
            os.dup2(nothing.fileno(), descriptor)
    for name in [name for name in sys.modules if name.split(".")[0] == "tests"]:
        del sys.modules[name]
    sys.path[:] = [str(tree), *(path for path in sys.path if path not in ("", str(ROOT)))]
    os.environ["PYTHONPATH"] = str(tree)
    os.chdir(tree)
    import pytest

    told = ["-x", "-q", "-m", "not slow", "-p", "no:cacheprovider", "-p", "no:randomly"]
    return int(pytest.main([*told, *tests]))


def table(counts: dict[str, Counter[str]]) -> str:
    """Returns the outcomes by folder, as a table of Markdown."""
    rows = ["| folder | mutants | found | of those, by the time limit |", "|---|---|---|---|"]
    total: Counter[str] = Counter()
    for folder, count in sorted(counts.items()):
        rows.append(_row(folder, count))
        total += count
    return "\n".join([*rows, _row("all", total)])


def _row(name: str, count: Counter[str]) -> str:
    found = count[FOUND] + count[LASTED]
    return f"| {name} | {count.total()} | {found / count.total():.0%} | {count[LASTED]} |"


if __name__ == "__main__":
    sys.exit(main())
