"""Draws the chart, by running tests over a marked copy of the tree."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.scripts.affected import chart
from tests.scripts.affected.chart import Chart
from tests.scripts.affected.marked import copy_tree, mark

COUNT, FOLDER, CASES = "count", "MIRROR_TEST_RECORDS", "MIRROR_TEST_CASES"


def record(tests: Sequence[str], processes: str, cases: int) -> int:
    """Runs so many cases of each test, 0 for all of them; returns the exit code of pytest."""
    with tempfile.TemporaryDirectory() as folder:
        tree, records = Path(folder, "tree"), Path(folder, "records")
        records.mkdir()
        copy_tree(tree)
        names = mark(tree)
        (records / COUNT).write_text(str(len(names)))
        code = subprocess.call(
            [
                *(sys.executable, "-m", "pytest", "-q", "-m", "not slow"),
                *("-p", "tests.scripts.affected.recording", "-p", "no:cacheprovider"),
                *("--numprocesses", processes, "--dist", "worksteal", *tests),
            ],
            cwd=tree,
            env={**os.environ, "PYTHONPATH": str(tree), FOLDER: str(records), CASES: str(cases)},
        )
        lines = [line for path in records.glob("*.jsonl") for line in path.open()]
    known = chart.loaded(chart.PATH.read_text()) if tests else Chart({}, {})
    chart.PATH.write_text(drawn(known, names, lines).saved())
    return code


def drawn(known: Chart, names: Sequence[str], lines: Iterable[str]) -> Chart:
    """Returns a chart with records taken in; what it knew of these tests is forgotten."""
    costs: dict[str, list[float]] = defaultdict(list)
    num_cases: dict[str, int] = {}
    found: dict[str, set[str]] = {name: set() for name in names}
    for line in lines:
        case, cost, number_of_cases, numbers = json.loads(line)
        if case:  # else what a process has imported and collected
            test = case.split("[")[0]
            costs[test].append(cost)
            num_cases[test] = number_of_cases
            for number in numbers:
                found[names[number]].add(test.split("::")[0])
    seconds: dict[str, float] = defaultdict(float)
    for test, spent in costs.items():
        # The dearest case may have made what all share.
        seconds[test.split("::")[0]] += sum(spent) + min(spent) * (num_cases[test] - len(spent))
    for name, tests in known.runs.items():
        if name in found:
            found[name] |= tests - set(seconds)
    return Chart(
        {**known.seconds, **seconds},
        {name: frozenset(tests) for name, tests in found.items() if tests},
    )
