"""A plug-in of pytest: one case of each test first, an end after some time, and what happens."""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path


class Telling:
    """Writes a line as a test begins ("T its name"), and one as something fails ("F its name").

    Args:
        told: the file of these lines.
        seconds: of processor time, after which no test begins.
    """

    def __init__(self, told: Path, seconds: float) -> None:
        self._told, self._seconds = told, seconds

    def _tell(self, line):
        with self._told.open("a") as file:
            print(line, file=file)

    def pytest_collection_modifyitems(self, items):
        """Puts the middle case of every test first: most of the others find the same faults."""
        cases = defaultdict(list)
        for item in items:
            cases[item.nodeid.split("[")[0]].append(item)
        place = {}
        for of_test in cases.values():
            half = len(of_test) // 2
            for i, item in enumerate([*of_test[half:], *of_test[:half]]):
                place[item] = i
        items.sort(key=place.__getitem__)

    def pytest_runtest_logstart(self, nodeid):
        self._tell(f"T {nodeid}")

    def pytest_runtest_logfinish(self):
        self._tell("")

    def pytest_runtest_protocol(self, item):
        if sum(os.times()[:4]) > self._seconds:
            self._tell("stopped")
            item.session.shouldstop = "no time is left"

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self._tell(f"F {report.nodeid}")

    def pytest_collectreport(self, report):
        if report.failed:
            self._tell(f"F {report.nodeid}")
