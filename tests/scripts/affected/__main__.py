"""Runs the tests that a change calls for, or draws the chart that says which they are.

python -m tests.scripts.affected [--base main] [--seconds 120] [--list]
    Runs the tests of all that differs from where the branch has left main.
python -m tests.scripts.affected record [tests ...]
    Runs tests over a marked copy, and writes what they run into the chart. Without arguments all
    are run, and the chart is made anew.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from tests.scripts.affected import changes, chart, choice, record
from tests.scripts.affected.marked import ROOT


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.scripts.affected", usage=__doc__)
    parser.add_argument("what", nargs="*", help="'record', and what to run")
    parser.add_argument("--base", default="main", help="the branch, or commit, to compare with")
    parser.add_argument("--seconds", type=float, default=120.0, help="of processor time")
    parser.add_argument("--cases", type=int, default=0, help="of each test, for the chart")
    parser.add_argument("--list", action="store_true", help="say what, and run nothing")
    parser.add_argument("--processes", default="auto", help="as pytest-xdist's --numprocesses")
    told = parser.parse_args()
    if told.what:
        return record.record(told.what[1:], told.processes, told.cases)
    chosen, left = affected(ROOT, told.base, told.seconds)
    print("affected:", *chosen, sep="\n    ", flush=True)
    if left:
        print(f"left out, for they take more than {told.seconds:g} s in all: {' '.join(left)}")
    if told.list:
        return 0
    parallel = ["--numprocesses", told.processes, "--dist", "worksteal"]
    return subprocess.call(
        [sys.executable, "-m", "pytest", "-q", "-m", "not slow", *parallel, *chosen], cwd=ROOT
    )


def affected(root: Path, base: str, seconds: float) -> tuple[list[str], list[str]]:
    """Returns the tests to run, and those for which there is no time."""
    known = chart.loaded(chart.PATH.read_text())
    start = changes.base_of(root, base)
    files = changes.changed_files(root, start)
    functions = {
        function
        for file in files
        if file.startswith("mirror/") and file.endswith(".py")
        for function in changes.changed_functions(root, start, file)
    }
    must = choice.must_run(files, root)
    may = [test for test in choice.may_run(functions, known) if (root / test).exists()]
    return choice.within(must, may, known.seconds, seconds)


if __name__ == "__main__":
    sys.exit(main())
