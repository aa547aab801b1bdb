"""The table of mutants, by folder, and the page that it stands on."""

from __future__ import annotations

import datetime
import platform
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.scripts.mutants.making import Mutant
from tests.scripts.mutants.outcomes import FOUND, LASTED, MISSED, Outcomes

SAME = "no fault"
SINCE = "since"
HEAD = (
    "| folder | mutants | no fault | found by a test | ended by time | found of the faults "
    "| of those, at a later try | not found |",
    "|---|---|---|---|---|---|---|---|",
)


def counted(mutants: Sequence[Mutant], outcomes: Outcomes) -> dict[str, Counter[str]]:
    """Returns what came of the mutants of every folder."""
    counts: dict[str, Counter[str]] = {}
    for mutant in mutants:
        if mutant.name not in outcomes.equivalent and mutant.name not in outcomes.last:
            continue
        count = counts.setdefault(str(Path(mutant.file).parent), Counter())
        if mutant.name in outcomes.equivalent:
            count[SAME] += 1
        else:
            count[outcomes.last[mutant.name].outcome] += 1
            if outcomes.first[mutant.name].outcome != outcomes.last[mutant.name].outcome:
                count[SINCE] += 1
    return counts


def table(mutants: Sequence[Mutant], outcomes: Outcomes) -> Iterator[str]:
    """Yields the lines of a table: a row a folder, with what is in folders of it in bold."""
    counts = counted(mutants, outcomes)
    yield from HEAD
    whole: Counter[str] = Counter()
    for root in sorted({"/".join(folder.split("/")[:2]) for folder in counts}):
        below = {f: count for f, count in counts.items() if f == root or f.startswith(f"{root}/")}
        if list(below) != [root]:
            for folder, count in sorted(below.items()):
                yield _row(f"`{folder}/`", count)
        total = sum(below.values(), Counter[str]())
        yield _row(f"**`{root}/` in all**", total)
        whole += total
    yield _row("**all**", whole)


def _row(name: str, count: Counter[str]) -> str:
    found, lasted, missed = count[FOUND], count[LASTED], count[MISSED]
    faults = found + lasted + missed
    share = f"{(found + lasted) / faults:.0%}" if faults else ""
    cells = (faults + count[SAME], count[SAME], found, lasted, share, count[SINCE], missed)
    return f"| {name} | {' | '.join(map(str, cells))} |"


def page(mutants: Sequence[Mutant], outcomes: Outcomes, arguments: Sequence[str]) -> str:
    """Returns the page, of what the arguments of the script have drawn."""
    import torch

    counts = counted(mutants, outcomes).values()
    num_tried = sum(count[each] for count in counts for each in (FOUND, LASTED, MISSED, SAME))
    shown = _without_paths(arguments)
    versions = f"Python {platform.python_version()}, torch {torch.__version__.split('+')[0]}"
    missed = [
        f"- `{mutant.name}`"
        for mutant in mutants
        if mutant.name not in outcomes.equivalent
        and mutant.name in outcomes.last
        and outcomes.last[mutant.name].outcome == MISSED
    ]
    same = [
        f"- `{mutant.name}`: {outcomes.equivalent[mutant.name]}"
        for mutant in mutants
        if mutant.name in outcomes.equivalent
    ]
    return "\n".join(
        [
            "# Mutants",
            "",
            "How many small faults the tests find; each is one operator, condition, constant,",
            "call or result of a function, changed. Written by `make mutants`, or rather by",
            "",
            "```",
            f"python -m tests.scripts.mutants {' '.join(shown)}",
            "```",
            "",
            f"on {datetime.date.today().isoformat()} with {versions}. A mutant is tried with the",
            "tests that run its function, one case of each first, until one fails; one that is",
            "ended by time keeps a test from ending. *No fault* is what nobody could tell from",
            "the code as it is: see below. What was not found was tried again, with more time,",
            "with tests chosen by hand, or with new ones: that is a later try.",
            f"Of {len(mutants)} drawn {num_tried} have been tried.",
            "",
            *table(mutants, outcomes),
            "",
            *(["## Not found", "", *missed, ""] if missed else []),
            *(["## No faults", "", *same, ""] if same else []),
        ]
    )


def _without_paths(arguments: Sequence[str]) -> Iterator[str]:
    """Leaves out where results are kept, which says nothing."""
    skip = False
    for argument in arguments:
        if skip or argument in ("--outcomes", "--page"):
            skip = not skip
        elif argument != "--known":
            yield argument
