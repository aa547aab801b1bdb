"""Runs checks one by one in a process of their own, with deadlines and a budget for all.

An endless kernel, a driver that does not return, and an illegal address (after which nothing works
in its process) fail one check each. The process reports each outcome as a line of JSON in a pipe.
A process that is late or has ended is replaced by another one, which runs the remaining checks.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import subprocess
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from time import monotonic
from typing import Any

from arguments import at_least, new_file
from checking import Skipped
from timing import seconds_of

Check = Callable[[], str]


@dataclass
class Outcome:
    """The outcome of a check: passed, failed or skipped; ``detail`` is its report or reason."""

    name: str
    state: str
    seconds: float
    detail: str

    def __str__(self) -> str:
        return f"{self.state:7} {self.name:44} {self.seconds:7.2f} s  {self.detail}"


def run_check(name: str, check: Check) -> Outcome:
    """Runs one check, with any outcome."""
    outcome = Outcome(name, "failed", 0.0, "")

    def run() -> None:
        try:
            outcome.detail = check()
            outcome.state = "passed"
        except Skipped as skipped:
            outcome.state, outcome.detail = "skipped", str(skipped)
        except Exception as error:
            traceback.print_exc()
            outcome.detail = f"{type(error).__name__}: {error}"

    outcome.seconds = seconds_of(run)
    return outcome


def add_options(parser: argparse.ArgumentParser, budget_seconds: int) -> None:
    """Adds the options of a program whose checks ``run_checks`` runs."""
    parser.add_argument("--only", default="", metavar="TEXT", help="checks with this in the name")
    parser.add_argument(
        "--deadline", type=at_least(1), default=90, metavar="SECONDS", help="of each check"
    )
    parser.add_argument(
        "--budget", type=at_least(1), default=budget_seconds, metavar="SECONDS", help="of all"
    )
    parser.add_argument("--json", type=new_file, metavar="FILE", help="for what was found")
    # The process that runs the checks: this program, with the first check and the report's pipe.
    parser.add_argument("--work", type=int, nargs=2, help=argparse.SUPPRESS)


def run_checks(
    command: Sequence[str], checks: Iterable[tuple[str, Check]], arguments: argparse.Namespace
) -> int:
    """Reports the chosen checks of a program; in the process of ``--work``, runs them.

    Args:
        command: the program, with its own arguments.
        checks: names and checks, of which ``--only`` chooses.
        arguments: with the options of ``add_options``.

    Returns:
        The exit status of the program: see ``report``.
    """
    chosen = [(name, check) for name, check in checks if arguments.only in name]
    if arguments.work:
        work(chosen, *arguments.work)
        return 0
    return report(
        [*command, "--only", arguments.only, "--work"],
        [name for name, _ in chosen],
        deadline_seconds=arguments.deadline,
        budget_seconds=arguments.budget,
        file=arguments.json,
    )


def work(checks: Sequence[tuple[str, Check]], first: int, pipe: int) -> None:
    """Runs the checks from the given one on, in the process, and writes outcomes to the pipe."""
    with os.fdopen(pipe, "w", buffering=1) as told:
        for name, check in checks[first:]:
            told.write(json.dumps(asdict(run_check(name, check))) + "\n")


def report(
    command: Sequence[str],
    names: Sequence[str],
    *,
    deadline_seconds: float,
    budget_seconds: float,
    file: str | None,
) -> int:
    """Supervises checks, prints each outcome and the counts; returns 1 if one failed, else 0.

    Args:
        file: for the outcomes, as JSON; ``None``: none is written. The rest as for ``supervise``.
    """
    begin, outcomes = monotonic(), []
    for outcome in supervise(
        command, names, deadline_seconds=deadline_seconds, budget_seconds=budget_seconds
    ):
        print(outcome, flush=True)
        outcomes.append(outcome)
    seconds, counts = monotonic() - begin, Counter(outcome.state for outcome in outcomes)
    told = ", ".join(f"{counts[state]} {state}" for state in ("passed", "failed", "skipped"))
    print(f"{told}; {seconds:.0f} s of {budget_seconds:g} s")
    if file is not None:
        found = {
            "checks": [asdict(outcome) for outcome in outcomes],
            "seconds": seconds,
            "budget_seconds": budget_seconds,
        }
        with open(file, "w") as written:
            json.dump(found, written, indent=1)
    return int(counts["failed"] > 0)


def supervise(
    command: Sequence[str],
    names: Sequence[str],
    *,
    deadline_seconds: float,
    budget_seconds: float,
    env: Mapping[str, str] | None = None,
) -> Iterator[Outcome]:
    """Yields the outcome of every check, in order.

    Args:
        command: of the process that runs them. It gets two more arguments, for ``work``: the
            number of the first check, and that of the pipe.
        names: of all checks.
        deadline_seconds: how long a check may take, the start of its process not included.
        budget_seconds: how long all may take together; those that are left then are left out.
    """
    end = monotonic() + budget_seconds
    worker: _Worker | None = None
    try:
        for i, name in enumerate(names):
            left = end - monotonic()
            if left <= 0:
                yield Outcome(name, "skipped", 0.0, f"left out: no time in {budget_seconds:g} s")
                continue
            # To start, a process imports torch, and begins to use the devices.
            patience = deadline_seconds + (deadline_seconds if worker is None else 0)
            if worker is None:
                worker = _Worker([*command, str(i)], env)
            begin = monotonic()
            answer = worker.next(min(patience, left))
            if isinstance(answer, str):
                seconds = monotonic() - begin
                worker.end()
                worker = None
                yield Outcome(name, "failed", seconds, answer)
            else:
                yield Outcome(**answer)
        if worker is not None:
            worker.leave()
    finally:
        if worker is not None:
            worker.end()


class _Worker:
    """A process that runs checks, and all processes that it starts."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str] | None) -> None:
        self._pipe, theirs = os.pipe()
        try:
            self._process = subprocess.Popen(
                [*command, str(theirs)],
                pass_fds=[theirs],
                start_new_session=True,
                env={**os.environ, **(env or {})},
            )
        finally:
            os.close(theirs)
        self._read = b""

    def next(self, seconds: float) -> dict[str, Any] | str:
        """Returns the next outcome, or the reason why there is none."""
        end = monotonic() + seconds
        while b"\n" not in self._read:
            is_there, _, _ = select.select([self._pipe], [], [], max(end - monotonic(), 0))
            if not is_there:
                return f"did not end within {seconds:.0f} s; its process was killed"
            part = os.read(self._pipe, 1 << 16)
            if not part:
                return f"its process ended {_how(self._process.wait())}"
            self._read += part
        line, _, self._read = self._read.partition(b"\n")
        outcome: dict[str, Any] = json.loads(line)
        return outcome

    def leave(self) -> None:
        """Waits for the process to exit after its last outcome."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=10)

    def end(self) -> None:
        """Kills the process and its children."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._pipe)


def _how(status: int) -> str:
    if status < 0:
        return f"by {signal.Signals(-status).name}"
    return f"with status {status}"
