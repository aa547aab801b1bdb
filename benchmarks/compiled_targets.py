"""Limits for the ratios of compiled steps that ``train_step.py`` measures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from contestants import COMPILED
from train_report import Row, Target

# (kind, replicas) -> {(the other contestant, its replicas): limit}
SMALL: dict[int, dict[tuple[str, int], float]] = {
    2: {("DDP", 2): 0.35, ("TensorFlow", 2): 0.7, ("plain", 1): 1.0},
    4: {("DDP", 4): 0.35},
}
LARGE_CASES = ("cnn", "wide-mlp", "transformer", "resnet18", "lstm-lm")
LARGE_LIMIT, LARGE_WORST = 0.95, 1.05
FEW_PARAMETERS, HOST_US_FEW, HOST_US_MANY, HOST_CALLS = 20, 50.0, 250.0, 10.0
COMPILE_SECONDS, SECOND_PROCESS_SECONDS = 30.0, 3.0


def step_targets(rows: Sequence[Row]) -> list[Target]:
    """Returns the ratios of these rows that have limits."""
    found: list[Target] = []
    on_cpu = any(row.is_plain and row.on_cpu for row in rows)
    for case in dict.fromkeys(row.case.name for row in rows if on_cpu):
        here = [row for row in rows if row.case.name == case]
        if case == "small-mlp":
            found += _small(here)
        elif case in LARGE_CASES:
            found += _large(here)
    return found


def _small(rows: Sequence[Row]) -> Iterator[Target]:
    by_name = {row.name: row for row in rows}
    for n, limits in SMALL.items():
        for (kind, m), limit in limits.items():
            yield from _ratio(_compiled(rows, n), by_name.get(f"{kind} {m}"), limit)


def _large(rows: Sequence[Row]) -> Iterator[Target]:
    compiled = _compiled(rows, 2)
    eager = [
        row
        for row in rows
        if row.contestant.kind == "mirrored" and row.contestant.n == 2 and row is not compiled
    ]
    others = [
        min(eager, key=lambda row: row.samples.median, default=None),
        next((row for row in rows if row.name == "DDP 2"), None),
    ]
    for other in others:
        for target in _ratio(compiled, other, LARGE_LIMIT):
            yield target
            assert target.spread is not None
            what = f"{target.what}, its upper quartile"
            yield Target(what, target.spread[1], None, LARGE_WORST)


def _compiled(rows: Sequence[Row], n: int) -> Row | None:
    return next((r for r in rows if r.contestant.way == COMPILED and r.contestant.n == n), None)


def _ratio(row: Row | None, other: Row | None, limit: float) -> Iterator[Target]:
    if row is not None and other is not None:
        spread = row.samples.over(other.samples).spread
        what = f"{row.case.name}: compiled, N = {row.contestant.n} / {other.name}"
        yield Target(what, row.samples.median / other.samples.median, spread, limit)


def cost_targets(found: dict[str, Any]) -> list[Target]:
    """Returns the costs that ``compiled_costs.py`` found, beside their limits."""
    first, second = found["compile_seconds"]
    targets = [
        Target("transformer: seconds to trace and compile", first, None, COMPILE_SECONDS),
        Target("the same in a second process", second, None, SECOND_PROCESS_SECONDS),
    ]
    for row in found["added_replica"]:
        where = f"an added replica, {row['parameters']} parameters"
        middle, *spread = row["us"]
        limit = HOST_US_FEW if row["parameters"] <= FEW_PARAMETERS else HOST_US_MANY
        targets.append(Target(f"{where}: us of the host", middle, (spread[0], spread[1]), limit))
        targets.append(Target(f"{where}: Python functions called", row["calls"], None, HOST_CALLS))
    return targets
