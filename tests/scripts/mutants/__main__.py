"""Prints which share of small faults the tests find: python -m tests.scripts.mutants PATH ...

A mutant is the code with one operator, condition, constant, call or result changed. A sample is
drawn from the files of every path; it depends on the seed and on the mutants' names alone. For
each mutant the tests of its file run until one fails, those of the file's name first. A mutant
that no test finds shows a gap in the tests, or no difference; equivalent.txt lists the latter.

With --outcomes a run continues where an earlier one ended, and tries again what was not found.
mutmut and cosmic-ray have other mutations, so they cannot repeat the sample of tests/MUTANTS.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.scripts.affected import ROOT, affected_tests
from tests.scripts.mutants.mutations import Mutant, mutants_of, spread

FOUND, TIMEOUT, MISSED = "found", "timeout", "missed"
EQUIVALENT = Path(__file__).with_name("equivalent.txt")
Outcome = tuple[str, str]  # FOUND, TIMEOUT or MISSED, and the test that found it


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.scripts.mutants", description=__doc__)
    parser.add_argument("paths", nargs="+", help="files or folders of mirror/")
    parser.add_argument("--sample", type=int, default=50, help="how many mutants, of each path")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=60.0, help="of processor, for a mutant")
    parser.add_argument("--limit", type=float, default=90.0, help="of wall time, for one test")
    parser.add_argument("--processes", type=int, default=1, help="how many mutants at a time")
    parser.add_argument("--tests", nargs="*", default=[], help="files of tests to run first")
    parser.add_argument("--outcomes", type=Path, help="a file that keeps what was found")
    args = parser.parse_args()
    mutants = [mutant for path in args.paths for mutant in sample(path, args.sample, args.seed)]
    equivalent = reasons(EQUIVALENT.read_text())
    outcomes = load(args.outcomes)
    trials = [
        (mutant, [*args.tests, *affected_tests([mutant.file], ROOT)])
        for mutant in mutants
        if mutant.name not in equivalent and outcomes.get(mutant.name, (MISSED,))[0] == MISSED
    ]
    # A run that is interrupted has tried a sample, too.
    random.Random(args.seed).shuffle(trials)
    for mutant, outcome in try_all(trials, args.processes, args.seconds, args.limit):
        outcomes[mutant.name] = outcome
        print(outcome[0], mutant.name, outcome[1], flush=True)
        if args.outcomes:
            with args.outcomes.open("a") as file:
                print(json.dumps([mutant.name, outcome]), file=file)
    print("\n".join(table(mutants, outcomes, equivalent)))
    return 0


def sample(path: str, size: int, seed: int) -> Sequence[Mutant]:
    """Returns so many mutants of a file or a folder, spread over its files."""
    paths = [ROOT / path] if (ROOT / path).is_file() else (ROOT / path).rglob("*.py")
    files = sorted(path.relative_to(ROOT).as_posix() for path in paths)
    every = [mutant for file in files for mutant in mutants_of(file, (ROOT / file).read_text())]
    return spread(every, size, seed)


def reasons(text: str) -> Mapping[str, str]:
    """Returns why mutants are no faults: a line each with the name, an indented one below it."""
    found: dict[str, str] = {}
    name = ""
    for line in text.splitlines():
        if line.startswith("    "):
            found[name] = f"{found[name]} {line.strip()}".strip()
        elif line and not line.startswith("#"):
            name = line
            found[name] = ""
    return found


def load(path: Path | None) -> dict[str, Outcome]:
    """Returns the last outcome of every mutant in a file that --outcomes has written."""
    lines = path.read_text().splitlines() if path and path.exists() else []
    return {name: tuple(outcome) for name, outcome in map(json.loads, lines)}


def try_all(
    trials: Sequence[tuple[Mutant, Sequence[str]]], processes: int, seconds: float, limit: float
) -> Iterator[tuple[Mutant, Outcome]]:
    """Yields the outcome of every mutant, each with its tests, in copies of the tree.

    A test that also fails without the mutant finds nothing: such a mutant is yielded again.
    """
    trees: queue.SimpleQueue[Path] = queue.SimpleQueue()

    def run(trial: tuple[Mutant, Sequence[str]]) -> tuple[Mutant, Outcome]:
        tree = trees.get()
        mutant, tests = trial
        path = tree / mutant.file
        original = path.read_text()
        path.write_text(mutant.text)
        try:
            return mutant, run_tests(tree, tests, seconds, limit)
        finally:
            path.write_text(original)
            trees.put(tree)

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(processes) as pool:
        for i in range(processes if trials else 0):
            copy_tree(Path(folder, str(i)))
            trees.put(Path(folder, str(i)))
        found: dict[str, list[Mutant]] = {}
        for mutant, outcome in pool.map(run, trials):
            yield mutant, outcome
            if outcome[0] == FOUND:
                found.setdefault(outcome[1], []).append(mutant)
        for test, mutants in found.items():
            if run_tests(Path(folder, "0"), [test], seconds, limit)[0] != MISSED:
                yield from ((m, (MISSED, f"{test} also fails without it")) for m in mutants)


def copy_tree(to: Path) -> None:
    """Copies what git tracks, new files, and the libraries that are built in place."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    known = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    built = (str(path.relative_to(ROOT)) for path in ROOT.glob("mirror/**/*.so"))
    for name in [*known.split("\0")[:-1], *built]:
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)


def run_tests(tree: Path, tests: Sequence[str], seconds: float, limit: float) -> Outcome:
    """Runs tests over a tree until one fails; see limits.py for the limits."""
    command = [sys.executable, "-B", "-m", "pytest", "-x", "-q", "-rfE", "-m", "not slow"]
    command += ["-p", "no:cacheprovider", "-p", "tests.scripts.mutants.limits"]
    command += [f"--max-processor={seconds}", f"--max-test={limit}", *dict.fromkeys(tests)]
    with tempfile.TemporaryFile("w+") as file:
        process = subprocess.Popen(
            command,
            cwd=tree,
            env={**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        process.wait()
        with contextlib.suppress(ProcessLookupError):  # processes that the tests have started
            os.killpg(process.pid, signal.SIGKILL)
        file.seek(0)
        output = file.read()
    lines = [line.split(" - ")[0] for line in output.splitlines()]
    failed = [line.split(" ", 1)[1] for line in lines if line.startswith(("FAILED ", "ERROR "))]
    if failed:
        return FOUND, failed[0]
    if "Timeout (" in output:
        return TIMEOUT, ""
    # 5: no test was collected; 2: no processor time was left.
    return (MISSED, "") if process.returncode in (0, 2, 5) else (FOUND, "the import")


def table(
    mutants: Sequence[Mutant], outcomes: Mapping[str, Outcome], equivalent: Mapping[str, str]
) -> Iterator[str]:
    """Yields Markdown: a row for each folder, then the mutants that no test has found."""
    counts: dict[str, Counter[str]] = {}
    for mutant in mutants:
        kind = "no fault" if mutant.name in equivalent else outcomes.get(mutant.name, ("",))[0]
        for row in (f"`{Path(mutant.file).parent}/`", "**all**"):
            counts.setdefault(row, Counter())[kind] += 1
    counts["**all**"] = counts.pop("**all**", Counter())
    yield "| folder | mutants | no fault | found by a test | timeout | found | not found |"
    yield "|---|---|---|---|---|---|---|"
    for row, count in counts.items():
        ended = count[FOUND] + count[TIMEOUT]
        faults = ended + count[MISSED]
        share = f"{ended / faults:.0%}" if faults else ""
        cells = (faults + count["no fault"], count["no fault"], count[FOUND], count[TIMEOUT])
        yield f"| {row} | {' | '.join(map(str, cells))} | {share} | {count[MISSED]} |"
    yield ""
    for mutant in mutants:
        if mutant.name not in equivalent and outcomes.get(mutant.name, ("",))[0] == MISSED:
            yield f"- not found: `{mutant.name}`"


if __name__ == "__main__":
    sys.exit(main())
