"""Measures parallel replicas beside lockstep, DDP and the ordinary interpreter, and the schedules.

All contestants take turns on the same machine. Read the ratios, and run this on a machine that
does nothing else. Every number is the median of the ratios of the rounds.

    python benchmarks/parallel_replicas.py --free-threaded .venv-free-threaded/bin/python
        two replicas without the GIL, the whole step in run
    python benchmarks/parallel_replicas.py --default 10
        the default schedule of this interpreter beside DDP, in ten processes, in and outside run
    python benchmarks/parallel_replicas.py --schedules
        each schedule of this interpreter over the default, and the default over DDP
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from resident import Residents
from timing import Elsewhere, Samples, interleaved

HERE = Path(__file__).parent
CASES = ("mlp-48-tensors", "cnn", "transformer", "lstm")
JUDGED = ("small-mlp", "cnn", "wide-mlp", "transformer")
WAYS = ("step", "transparent")
WARMUP_STEPS = 400  # "auto" decides about long passes in the first steps
WARMUP_SECONDS = 5.0  # at most, or 30 steps
ROUND_SECONDS = 0.3  # of each contestant's part of a round


class Starter:
    """Starts contestants; they end with the stack."""

    def __init__(self, stack: ExitStack, n: int) -> None:
        self._stack, self._n, self._count = stack, n, 0
        self._folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="mirror-bench-"))

    def mirrored(
        self, schedule: str, way: str = "step", python: str = sys.executable
    ) -> Residents:
        return self._start(python, [{"kind": "mirrored", "schedule": schedule, "way": way}])

    def plain(self, python: str = sys.executable) -> Residents:
        return self._start(python, [{"kind": "plain"}])

    def ddp(self, python: str = sys.executable) -> Residents:
        ranks = range(self._n)
        return self._start(python, [{"kind": "DDP", "rank": r} for r in ranks])

    def _start(self, python: str, workers: Sequence[dict[str, Any]]) -> Residents:
        self._count += 1
        is_mirrored = workers[0]["kind"] == "mirrored"
        common = {
            "devices": ["cpu"] * (self._n if is_mirrored else 1),
            "threads": 1,
            "num_ranks": self._n,
            "store": f"{self._folder}/{self._count}",
        }
        program = str(HERE / "train_worker.py")
        commands = [[python, program, json.dumps(common | worker)] for worker in workers]
        # Making an optimizer imports triton, which turns the GIL on; others refuse the variable.
        env = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        if python != sys.executable:
            env["PYTHON_GIL"] = "0"
        return self._stack.enter_context(Residents(commands, env=env))


def measure(case: str, contestants: Mapping[str, Residents], rounds: int) -> dict[str, Samples]:
    """Returns the seconds of a step of each contestant, round by round."""
    candidates = {}
    for name, residents in contestants.items():
        residents.ask(case=case)
        steps = min(WARMUP_STEPS, round(WARMUP_SECONDS / _slowest(residents, 5)))
        seconds = _slowest(residents, max(30, steps))
        steps = max(3, round(ROUND_SECONDS / seconds))
        candidates[name] = Elsewhere(partial(_slowest, residents, steps))
    return interleaved(candidates, rounds=rounds)


def _slowest(residents: Residents, steps: int) -> float:
    return float(max(residents.ask(steps=steps)))


def ratio(found: Mapping[str, Samples], of: str, to: str) -> str:
    """Returns the median of the ratios, and their quartiles."""
    ratios = found[of].over(found[to])
    low, high = ratios.spread
    return f"{ratios.median:.2f} ({low:.2f} .. {high:.2f})"


def rows_without_gil(python: str, cases: Sequence[str], n: int, rounds: int) -> Iterator[str]:
    yield "| case | plain step, ms | parallel / lockstep | parallel / DDP | lockstep / ordinary |"
    yield "|---|---|---|---|---|"
    with ExitStack() as stack:
        starter = Starter(stack, n)
        contestants = {
            "plain": starter.plain(python),
            "lockstep": starter.mirrored("lockstep", python=python),
            "parallel": starter.mirrored("parallel", python=python),
            "DDP": starter.ddp(python),
            "ordinary": starter.mirrored("lockstep"),
        }
        for case in cases:
            found = measure(case, contestants, rounds)
            yield (
                f"| {case} | {found['plain'].median * 1e3:.2f} "
                f"| {ratio(found, 'parallel', 'lockstep')} | {ratio(found, 'parallel', 'DDP')} "
                f"| {ratio(found, 'lockstep', 'ordinary')} |"
            )


def rows_of_default(num_processes: int, case: str, n: int, rounds: int) -> Iterator[str]:
    yield f"| {case}, way | default / DDP: median | least | most of {num_processes} processes |"
    yield "|---|---|---|---|"
    for way in WAYS:
        medians = []
        for _ in range(num_processes):
            with ExitStack() as stack:
                starter = Starter(stack, n)
                contestants = {"default": starter.mirrored("auto", way), "DDP": starter.ddp()}
                found = measure(case, contestants, rounds)
                medians.append(found["default"].over(found["DDP"]).median)
        middle = statistics.median(medians)
        yield f"| {way} | {middle:.2f} | {min(medians):.2f} | {max(medians):.2f} |"


def rows_of_schedules(cases: Sequence[str], n: int, rounds: int) -> Iterator[str]:
    schedules = ("lockstep", "staggered", "parallel")
    yield f"| case, way | {' | '.join(f'{s} / default' for s in schedules)} | default / DDP |"
    yield f"|---|{'---|' * 4}"
    for way in WAYS:
        with ExitStack() as stack:
            starter = Starter(stack, n)
            contestants = {s: starter.mirrored(s, way) for s in schedules}
            contestants |= {"default": starter.mirrored("auto", way), "DDP": starter.ddp()}
            for case in cases:
                found = measure(case, contestants, rounds)
                cells = [ratio(found, s, "default") for s in schedules]
                cells.append(ratio(found, "default", "DDP"))
                yield f"| {case}, {way} | {' | '.join(cells)} |"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--free-threaded", metavar="PYTHON", help="an interpreter without the GIL")
    what.add_argument("--default", type=int, metavar="PROCESSES")
    what.add_argument("--schedules", action="store_true")
    parser.add_argument("--cases", nargs="+")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=21)
    options = parser.parse_args(argv)
    n, rounds = options.replicas, options.rounds
    if options.free_threaded:
        rows = rows_without_gil(options.free_threaded, options.cases or CASES, n, rounds)
    elif options.default:
        rows = rows_of_default(options.default, (options.cases or JUDGED)[0], n, rounds)
    else:
        rows = rows_of_schedules(options.cases or JUDGED, n, rounds)
    for row in rows:
        print(row, flush=True)


if __name__ == "__main__":
    main()
