"""A plug-in of pytest: which functions of a marked tree every test runs, and what it costs.

Every process of the tests writes a file of lines: a case of a test, its seconds of processor time
(those of the processes it has started, too), and the numbers of the functions.

Where a test has many cases, some may stand for all: they are spread evenly. How many cases the
test has is in the line, too.
"""

from __future__ import annotations

import json
import mmap
import os
from collections import defaultdict
from pathlib import Path

import pytest

from tests.scripts.affected.marked import HITS
from tests.scripts.affected.record import CASES, COUNT, FOLDER

TICK = os.sysconf("SC_CLK_TCK")


def _own_hits() -> Path:
    """Makes this process's file of hits, before anything here has imported mirror."""
    folder = Path(os.environ[FOLDER])
    path = folder / f"{os.getpid()}.hits"
    path.write_bytes(bytes(int((folder / COUNT).read_text())))
    os.environ[HITS] = str(path)
    return path


PATH = _own_hits()


def pytest_configure(config):
    cases = int(os.environ.get(CASES, "0"))
    config.pluginmanager.register(Recorder(PATH, PATH.with_suffix(".jsonl"), cases))


class Recorder:
    """Writes a line a test."""

    def __init__(self, hits: Path, records: Path, cases: int) -> None:
        with hits.open("r+b") as file:
            self._hits = mmap.mmap(file.fileno(), 0)
        self._nothing = bytes(len(self._hits))
        self._records = records.open("a")
        self._collected = False
        self._cases = cases
        self._num_cases: dict[str, int] = {}

    def _note(self, name: str, seconds: float, num_cases: int) -> None:
        found = [i for i, hit in enumerate(self._hits[:]) if hit]
        self._hits[:] = self._nothing
        print(
            json.dumps([name, round(seconds, 3), num_cases, found]), file=self._records, flush=True
        )

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config, items):
        """Leaves some cases of every test, if so many are asked for."""
        of_test = defaultdict(list)
        for item in items:
            of_test[item.nodeid.split("[")[0]].append(item)
        kept = set()
        for cases in of_test.values():
            number = min(self._cases or len(cases), len(cases))
            chosen = {cases[(2 * i + 1) * len(cases) // (2 * number)] for i in range(number)}
            kept |= chosen
            self._num_cases |= {item.nodeid: len(cases) for item in chosen}
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        if not self._collected:
            self._note("", _processor_seconds(), 1)  # importing, and collecting the tests
            self._collected = True
        before = _processor_seconds()
        done = yield
        self._note(item.nodeid, _processor_seconds() - before, self._num_cases[item.nodeid])
        return done


def _processor_seconds() -> float:
    """Returns the seconds of this process and of all below it, those that have ended included.

    Linux may leave out a child while another one ends, so it is asked twice.
    """
    return max(sum(map(_seconds_of, _family(os.getpid()))) for _ in range(2))


def _family(process):
    yield process
    try:
        for thread in os.listdir(f"/proc/{process}/task"):
            for child in Path(f"/proc/{process}/task/{thread}/children").read_text().split():
                yield from _family(child)
    except OSError:
        pass  # it has ended meanwhile


def _seconds_of(process) -> float:
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rsplit(") ", 1)[1].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / TICK
