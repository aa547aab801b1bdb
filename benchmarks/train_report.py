"""Tables, limits and a plot for the measurements of ``train_step.py``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from cases import Case
from contestants import WAYS, Contestant
from pictures import finish
from timing import Samples


@dataclass(frozen=True)
class Row:
    """One contestant's step times in one case, a sample per round."""

    case: Case
    name: str
    contestant: Contestant
    samples: Samples

    @property
    def on_cpu(self) -> bool:
        return bool(self.contestant.workers[0]["devices"][0] == "cpu")

    @property
    def is_plain(self) -> bool:
        return self.name.startswith("plain ")

    @property
    def milliseconds(self) -> tuple[float, float, float]:
        low, high = self.samples.spread
        return 1e3 * self.samples.median, 1e3 * low, 1e3 * high

    @property
    def throughput(self) -> float:
        return self.case.batch * self.case.per_example / self.samples.median

    def as_json(self) -> dict[str, object]:
        return {
            "case": self.case.name,
            "name": self.name,
            "kind": self.contestant.kind,
            "n": self.contestant.n,
            "way": self.contestant.way,
            "schedule": self.contestant.schedule,
            "ms": self.milliseconds,
            f"{self.case.unit}_per_second": self.throughput,
            "seconds": self.samples.seconds,
        }


@dataclass(frozen=True)
class Target:
    """A ratio and its limit.

    Attributes:
        ratio: of medians.
        spread: the quartiles of the ratios round by round, or ``None`` for a single number.
    """

    what: str
    ratio: float
    spread: tuple[float, float] | None
    at_most: float

    @property
    def missed(self) -> bool:
        return self.ratio > self.at_most

    def as_json(self) -> dict[str, object]:
        return {
            "what": self.what,
            "ratio": self.ratio,
            "quartiles": self.spread,
            "at_most": self.at_most,
            "missed": self.missed,
        }


# (the other contestant, its replicas or 1) -> {case: limit}, for mirrored with N = 2 on a CPU.
LIMITS: dict[tuple[str, int], dict[str, float]] = {
    ("DDP", 2): {"small-mlp": 0.55, "cnn": 1.0, "wide-mlp": 0.8, "transformer": 1.0},
    ("plain", 1): {"cnn": 1.0, "wide-mlp": 1.35, "transformer": 1.1},
    ("TensorFlow", 2): {"small-mlp": 0.7, "wide-mlp": 0.95},
}
HOST_LIMIT_MS, MEMORY_LIMIT = 0.7, 1.1
JUDGED_REPLICAS = 8
LONG_STEP_SECONDS, LONG_STEP_LIMIT = 5e-3, 1.01
ONE_REPLICA_LIMITS = {"small-mlp": 1.25}


def targets_of(rows: Sequence[Row]) -> list[Target]:
    """Returns the ratios of these rows that have limits, each for the better schedule."""
    names = dict.fromkeys(row.case.name for row in rows)
    return [
        target
        for name in names
        for target in _targets_of_case([row for row in rows if row.case.name == name])
    ]


def _targets_of_case(rows: Sequence[Row]) -> Iterator[Target]:
    by_name = {row.name: row for row in rows}
    case, plain = rows[0].case.name, by_name["plain 1"]
    for way in WAYS:
        one = _better(rows, way, 1)
        if one is not None:
            limit = ONE_REPLICA_LIMITS.get(case)
            if limit is None and plain.samples.median >= LONG_STEP_SECONDS:
                limit = LONG_STEP_LIMIT
            # In the same process: two processes can differ by a percent by chance.
            other = by_name[f"plain beside {one.name}"]
            yield from _target(f"{case}: N = 1 / plain loop", way, one, other, limit)
        two = _better(rows, way, 2)
        for (kind, n), limits in LIMITS.items() if rows[0].on_cpu else ():
            other = by_name.get(f"{kind} {n}")
            if two is not None and other is not None:
                what = f"{case}: N = 2 / {kind}{' loop' if n == 1 else f' {n}'}"
                yield from _target(what, way, two, other, limits.get(case))


def host_targets(found: dict[str, Any]) -> list[Target]:
    """Returns the host work of an added replica, in ms, that ``host_time.py`` found."""
    targets = []
    for way, rows in found["ways"].items():
        several = [row for row in rows if 1 < row["n"] <= JUDGED_REPLICAS]
        if not several:
            continue
        last = max(several, key=lambda row: row["n"])
        what = f"host ms per added replica beyond its forward and backward; N = {last['n']}"
        middle, low, high = last["beyond_passes_ms"]
        targets.append(Target(f"{what}; way {WAYS[way]}", middle, (low, high), HOST_LIMIT_MS))
    return targets


def memory_targets(found: Sequence[dict[str, Any]]) -> list[Target]:
    """Returns the ratios that ``peak_memory.py`` found."""
    return [
        Target(
            f"{row['case']}: peak memory, N = {row['n']} / {row['n']} x one device; "
            f"way {WAYS[row['way']]}",
            row["ratio"],
            None,
            MEMORY_LIMIT,
        )
        for row in found
    ]


def _better(rows: Iterable[Row], way: str, n: int) -> Row | None:
    found = [
        row
        for row in rows
        if not row.is_plain and row.contestant.way == way and row.contestant.n == n
    ]
    return min(found, key=lambda row: row.samples.median, default=None)


def _target(what: str, way: str, row: Row, other: Row, limit: float | None) -> Iterator[Target]:
    if limit is not None:
        ratio = row.samples.median / other.samples.median
        spread = row.samples.over(other.samples).spread
        yield Target(f"{what}; way {WAYS[way]}; {row.contestant.schedule}", ratio, spread, limit)


def target_table(targets: Sequence[Target]) -> str:
    lines = ["| ratio | at most | measured | quartiles | |", "|---|---|---|---|---|"]
    for target in targets:
        spread = "" if target.spread is None else "{:.3f} to {:.3f}".format(*target.spread)
        lines.append(
            f"| {target.what} | {target.at_most:g} | {target.ratio:.3f} | {spread} "
            f"| {'MISSED' if target.missed else 'ok'} |"
        )
    return "\n".join(lines) + "\n"


def case_table(rows: Sequence[Row]) -> str:
    """Returns the step times of one case; the loops beside a replica are one row."""
    case = rows[0].case
    plain = rows[0].samples.median
    lines = [
        f"| {case.name}, batch {case.batch} | ms (median) | quartiles | {case.unit}/s | / plain |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        if row.is_plain and row is not rows[0]:
            continue
        middle, low, high = row.milliseconds
        lines.append(
            f"| {row.name} | {middle:.3f} | {low:.3f} to {high:.3f} | {row.throughput:,.0f} "
            f"| {row.samples.median / plain:.3f} |"
        )
    beside = [row.samples.median for row in rows[1:] if row.is_plain]
    if beside:
        lines.append(
            f"| plain, beside N = 1 in its process | {1e3 * median(beside):.3f} | "
            f"{1e3 * min(beside):.3f} to {1e3 * max(beside):.3f} (all) | | "
            f"{median(beside) / plain:.3f} |"
        )
    return "\n".join(lines) + "\n"


def picture(
    rows: Sequence[Row], host: dict[str, Any] | None, caption: str, num_gpus: int = 0
) -> Any:
    """Returns a figure of step time over the number of replicas, for each case, and the host's.

    A way is drawn with its better schedule; the host's time is that of the last measured way.

    Args:
        caption: drawn below the panels.
        num_gpus: up to so many replicas have a device each, and could be so many times as fast.
    """
    from matplotlib.figure import Figure

    cases = list(dict.fromkeys(row.case.name for row in rows))
    count = max(1, len(cases) + (host is not None))
    columns = 2 if count == 4 else min(3, count)
    lines = -(-count // columns)
    figure = Figure(figsize=(4.5 * columns, 3.6 * lines), layout="constrained")
    panels = [figure.add_subplot(lines, columns, i + 1) for i in range(count)]
    for panel, name in zip(panels, cases, strict=False):
        here = [row for row in rows if row.case.name == name]
        panel.set(title=name, xlabel="replicas", ylabel="ms per step", xscale="log")
        panel.axhline(here[0].milliseconds[0], color="gray", label="plain loop, one device")
        counts = sorted({row.contestant.n for row in here})
        if num_gpus > 1:
            ideal = [(n, here[0].milliseconds[0] / n) for n in counts if n <= num_gpus]
            panel.plot(*zip(*ideal, strict=True), ":", color="gray", label="that over n devices")
        for label, points in _lines(here):
            panel.plot(*zip(*points, strict=True), marker=".", label=label)
        panel.set_xticks(counts, map(str, counts))
        panel.minorticks_off()
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
    if cases:
        panels[0].legend(fontsize="small")
    if host is not None:
        _draw_host(panels[-1], host)
    finish(figure, caption)
    return figure


def _draw_host(panel: Any, host: dict[str, Any]) -> None:
    way, found = list(host["ways"].items())[-1]
    panel.set(title=f"host time, way {WAYS[way]}", xlabel="replicas", ylabel="ms per step")
    names = [str(row["n"]) for row in found]
    plain = [row["plain_passes_ms"] + row["plain_updates_ms"] for row in found]
    panel.plot(names, plain, color="black", marker=".", label="as many plain models")
    if all(row["split"] for row in found):
        below = [0.0] * len(found)
        for part in found[0]["split"]:
            heights = [row["ms"][0] * row["split"][part] for row in found]
            panel.bar(names, heights, bottom=below, label=part)
            below = [low + height for low, height in zip(below, heights, strict=True)]
    else:
        panel.bar(names, [row["ms"][0] for row in found], label="mirrored")
    panel.legend(fontsize="small")


def _lines(rows: Sequence[Row]) -> Iterator[tuple[str, list[tuple[int, float]]]]:
    counts = sorted({row.contestant.n for row in rows})
    for way, label in WAYS.items():
        best = [(n, _better(rows, way, n)) for n in counts]
        points = [(n, row.milliseconds[0]) for n, row in best if row is not None]
        if points:
            yield f"mirror: way {label}", points
    for kind in ("DDP", "DataParallel", "TensorFlow"):
        points = [(r.contestant.n, r.milliseconds[0]) for r in rows if r.contestant.kind == kind]
        if points:
            yield kind, points
