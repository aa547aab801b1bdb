"""Tells what share of mutants the tests find: python -m tests.scripts.mutants mirror/execution ...

A mutant is the code with one operator, condition, constant, call or result changed. A sample of
them is drawn; of each the tests that run its function are run, until one fails. What none finds is
printed: a hole in the tests, or no difference that anyone could see; the latter are named, with
the reason, in equivalent.txt. With --outcomes a run goes on where one before has ended, and tries
again what was not found; with --page the table is written.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.scripts.affected import chart
from tests.scripts.affected.marked import ROOT
from tests.scripts.mutants.making import Mutant, mutants_of, spread
from tests.scripts.mutants.outcomes import Outcomes
from tests.scripts.mutants.page import page, table
from tests.scripts.mutants.trying import Limits, Trial, tests_of, try_all


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.scripts.mutants", description=__doc__)
    parser.add_argument("places", nargs="+", help="files or folders of mirror/")
    parser.add_argument("--sample", type=int, default=50, help="how many mutants, of each place")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=10.0, help="of processor, for a mutant")
    parser.add_argument("--limit", type=float, default=90.0, help="of wall time, for one test")
    parser.add_argument("--processes", type=int, default=1, help="how many mutants at a time")
    parser.add_argument("--outcomes", type=Path, help="a file that keeps what was found")
    parser.add_argument("--known", action="store_true", help="try none: tell what is kept")
    parser.add_argument("--page", type=Path, help="a file of Markdown to write")
    told = parser.parse_args()
    drawn = [mutant for place in told.places for mutant in sample(place, told.sample, told.seed)]
    known = chart.loaded(chart.PATH.read_text())
    outcomes = Outcomes(told.outcomes)
    trials = [
        Trial(mutant, tests_of(mutant, known))
        for mutant in drawn
        if outcomes.to_try(mutant.name) and not told.known
    ]
    # A run that is ended before its end is a sample, too.
    random.Random(told.seed).shuffle(trials)
    limits = Limits(told.seconds, told.limit)
    with tempfile.TemporaryDirectory() as folder:
        for trial, result in (
            try_all(trials, Path(folder), told.processes, limits) if trials else ()
        ):
            outcomes.note(trial.mutant.name, result)
            place = f"{trial.mutant.file}:{trial.mutant.line}"
            said = trial.mutant.name.removeprefix(f"{trial.mutant.file}:")
            print(f"{result.outcome:8} {place} {said}  {result.by}", flush=True)
    print("\n".join(table(drawn, outcomes)))
    if told.page:
        told.page.write_text(page(drawn, outcomes, sys.argv[1:]))
    return 0


def sample(place: str, size: int, seed: int) -> Sequence[Mutant]:
    """Returns so many mutants of a file or a folder, spread over its files."""
    path = ROOT / place
    paths = [path] if path.is_file() else path.rglob("*.py")
    files = sorted(path.relative_to(ROOT).as_posix() for path in paths)
    every = [mutant for file in files for mutant in mutants_of(file, (ROOT / file).read_text())]
    return spread(every, size, seed)


if __name__ == "__main__":
    sys.exit(main())
