"""Runs tests over mutants, each in a fork of a process that has torch, and in a copied tree."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.scripts.affected import choice
from tests.scripts.affected.chart import Chart
from tests.scripts.affected.marked import ROOT, copy_tree
from tests.scripts.mutants.making import Mutant
from tests.scripts.mutants.outcomes import FOUND, LASTED, MISSED, Result
from tests.scripts.mutants.telling import Telling

MAX_FILES = 12  # of tests, for a mutant: each costs its collection
MAX_BYTES = 8 << 30  # of memory, for a mutant that asks for ever more
CHECKED = 25  # mutants found, after which their tests are run without them
LOOK = 0.05  # seconds
_DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG


@dataclass(frozen=True)
class Limits:
    """Attributes:
    seconds: of processor time; no test begins after these.
    wall: seconds that may pass until a test ends.
    """

    seconds: float
    wall: float


@dataclass(frozen=True)
class Trial:
    """A mutant, and the files of tests to find it with, by path."""

    mutant: Mutant
    tests: Sequence[str]


def tests_of(mutant: Mutant, known: Chart) -> list[str]:
    """Returns the files of tests that run a mutant's function, those named like its file first."""
    may = choice.may_run([f"{mutant.file}:{mutant.function}"], known)
    named = choice.namesakes(mutant.file, ROOT)
    first = [test for test in may if test in named] or named
    found = dict.fromkeys([*first, *may])
    return [test for test in found if (ROOT / test).exists()][:MAX_FILES]


def try_all(
    trials: Sequence[Trial], folder: Path, processes: int, limits: Limits
) -> Iterator[tuple[Trial, Result]]:
    """Yields trials and what came of them, as they end.

    A test that fails without the mutant, too, has found nothing: such trials come a second time.
    """
    _prepare()
    trees = [folder / str(i) for i in range(processes)]
    for tree in trees:
        tree.mkdir()
        copy_tree(tree)
    waiting = list(reversed(trials))
    running: list[Running] = []
    found: list[tuple[Trial, str]] = []
    while waiting or running:
        while waiting and trees:
            running.append(Running(waiting.pop(), trees.pop(), limits))
        time.sleep(LOOK)
        for one in list(running):
            result = one.result()
            if result is None:
                continue
            running.remove(one)
            trees.append(one.restored())
            yield one.trial, result
            if result.outcome == FOUND:
                found.append((one.trial, result.by))
        if trees and (len(found) >= CHECKED or (found and not waiting and not running)):
            failing = _failing({test for _, test in found}, trees[0], limits)
            for trial, test in found:
                if test in failing:
                    yield trial, Result(MISSED, f"{test} fails without it, too")
            found.clear()


class Running:
    """A fork that runs tests over one mutant.

    Args:
        tree: a copy of the tree, which has the mutant until ``restored``.
    """

    def __init__(self, trial: Trial, tree: Path, limits: Limits) -> None:
        self.trial = trial
        self._tree, self._limits = tree, limits
        self._path = tree / trial.mutant.file
        self._before = self._path.read_bytes(), self._path.stat()
        self._path.write_text(trial.mutant.text)
        # What Python keeps compiled is known by the size of its source, and by its time.
        later = self._before[1].st_mtime + 7200 + time.time() % 7200
        os.utime(self._path, (later, later))
        self._fork = Fork(trial.tests, tree, limits.seconds, first=True)

    def result(self) -> Result | None:
        """Returns what came of it, None as long as tests run."""
        ended = self._fork.ended(self._limits.wall)
        if ended is None:
            return None
        code, told = ended
        failed = [line[2:] for line in told if line.startswith("F ")]
        tests = [line[2:] for line in told if line.startswith("T ")]
        if failed:
            return Result(FOUND, failed[0])
        if code is None:
            return Result(LASTED, tests[-1] if tests else "the import")
        if any(line.startswith("Traceback") for line in told):
            raise RuntimeError("\n".join(told))
        if code not in (0, 5) and "stopped" not in told:
            return Result(FOUND, tests[-1] if tests else "the import")
        return Result(MISSED, f"by {len(tests)} tests of {len(self.trial.tests)} files")

    def restored(self) -> Path:
        """Returns the tree as it was."""
        content, stat = self._before
        self._path.write_bytes(content)
        os.utime(self._path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        return self._tree


class Fork:
    """A process that runs tests, and writes a line as each begins, and one as it fails.

    Args:
        seconds: of processor time, after which no test begins.
        first: whether to end with the first that fails.
    """

    def __init__(self, tests: Sequence[str], tree: Path, seconds: float, *, first: bool) -> None:
        self._told = tree / ".told"
        self._told.write_text("")
        self._begun = time.monotonic()
        self._process = os.fork()
        if self._process == 0:
            os.setsid()
            # Whoever started it may be killed; Linux alone can tell.
            ctypes.CDLL(None).prctl(_DIES_WITH_PARENT, signal.SIGKILL)
            code = 3
            try:
                code = _tested(tests, tree, self._told, seconds, first)
            except BaseException:
                with self._told.open("a") as file:
                    traceback.print_exc(file=file)
            finally:
                os._exit(code)

    def ended(self, wall: float) -> tuple[int | None, list[str]] | None:
        """Returns the exit code, and what was written; None as long as tests go on.

        The code is None if a test has lasted longer than so many seconds, and was ended.
        """
        done, status = os.waitpid(self._process, os.WNOHANG)
        quiet = min(time.monotonic() - self._begun, time.time() - self._told.stat().st_mtime)
        if not done and quiet < wall:
            return None
        # What the tests have started belongs to them.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process, signal.SIGKILL)
        if not done:
            os.waitpid(self._process, 0)
        told = self._told.read_text().splitlines()
        return os.waitstatus_to_exitcode(status) if done else None, told


def _failing(tests: set[str], tree: Path, limits: Limits) -> set[str]:
    """Returns those that fail as the code is."""
    existing = sorted(test for test in tests if (tree / test.split("::")[0]).exists())
    fork = Fork(existing, tree, float("inf"), first=False)
    while (ended := fork.ended(limits.wall)) is None:
        time.sleep(LOOK)
    return {line[2:] for line in ended[1] if line.startswith("F ")}


def _prepare() -> None:
    """Imports what every fork needs; nothing of mirror, nor of its tests."""
    import hypothesis  # noqa: F401
    import numpy as np  # noqa: F401
    import pytest  # noqa: F401
    import torch

    torch.optim.SGD([torch.zeros(1)], lr=0.1)


def _tested(tests: Sequence[str], tree: Path, told: Path, seconds: float, first: bool) -> int:
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_BYTES, MAX_BYTES))
    with open(os.devnull, "r+b") as nothing:
        for descriptor in range(3):
            os.dup2(nothing.fileno(), descriptor)
    for name in [name for name in sys.modules if name.split(".")[0] in ("tests", "mirror")]:
        del sys.modules[name]
    sys.path[:] = [str(tree), *(path for path in sys.path if path not in ("", str(ROOT)))]
    # Compiled once, for all forks over this tree.
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["PYTHONPATH"] = str(tree)
    os.chdir(tree)
    import pytest

    # hypothesis is imported already.
    warnings = ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    options = [
        *warnings,
        "-q",
        "-m",
        "not slow",
        "-p",
        "no:cacheprovider",
        *(["-x"] if first else []),
    ]
    return int(pytest.main([*options, *tests], plugins=[Telling(told, seconds)]))
