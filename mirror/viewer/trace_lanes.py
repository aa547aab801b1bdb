"""Lanes: the spans of a trace by replica, each span below the one that contains it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mirror.base.timeline import (
    BACKWARD,
    COMPILED,
    COMPILING,
    EXPOSED,
    FORWARD,
    INPUT,
    OPTIMIZER,
    PROGRAMS,
    REDUCTION,
    SHARED_PROGRAMS,
    WAITING,
)

# All of one lightness: dark text is readable on each, and each is visible on white and black.
COLOURS = {
    FORWARD: "#6ea8e8",
    BACKWARD: "#b695e6",
    REDUCTION: "#ee8896",
    OPTIMIZER: "#6fc48b",
    INPUT: "#eda75f",
    WAITING: "#c3c8ce",
    EXPOSED: "#e6cf66",
    PROGRAMS: "#7cc4e8",
    SHARED_PROGRAMS: "#8fcf7a",
    COMPILED: "#a5b8d4",
    COMPILING: "#d0ab84",
}
OTHER = "#b5b0a8"
_SAME = 1e-3  # microseconds; the rounding of equal times


@dataclass(frozen=True)
class Span:
    """An interval with a name and a kind; times are in microseconds.

    Attributes:
        begin: the time since the beginning of the trace.
        length: the duration.
        own: the duration without the spans inside.
    """

    name: str
    kind: str
    begin: float
    length: float
    own: float

    @property
    def end(self) -> float:
        return self.begin + self.length

    @property
    def words(self) -> str:
        """The name, kind and times; shown when the mouse points at the span."""
        kind = "" if self.name == self.kind else f" ({self.kind})"
        return f"{self.name}{kind}: {self.length:,.1f} us, from {self.begin:,.1f} us on"


@dataclass(frozen=True)
class Lane:
    """The spans of a replica, of the cross-replica context, or of overlapped reductions.

    Attributes:
        rows: spans that do not overlap; each lies inside a span of the row before.
    """

    name: str
    rows: tuple[tuple[Span, ...], ...]

    def own_by_kind(self) -> dict[str, float]:
        """Returns the microseconds of each kind, in the order of ``COLOURS``."""
        found = dict.fromkeys(COLOURS, 0.0)
        for span in (span for row in self.rows for span in row):
            found[span.kind] = found.get(span.kind, 0.0) + span.own
        return {kind: own for kind, own in found.items() if own > 0}


def lanes_of(events: Iterable[Mapping[str, Any]]) -> tuple[Lane, ...]:
    """Returns the non-empty lanes of a trace's events, replicas first."""
    names: dict[int, str] = {}
    by_lane: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "M":
            names[event["tid"]] = event["args"]["name"]
        else:
            by_lane[event["tid"]].append(event)
    origin = min((e["ts"] for found in by_lane.values() for e in found), default=0.0)
    return tuple(
        Lane(names.get(lane, f"lane {lane}"), _rows(found, origin))
        for lane, found in sorted(by_lane.items())
    )


def kinds_of(lanes: Iterable[Lane]) -> list[str]:
    """Returns the kinds of the spans, in the order of ``COLOURS``."""
    found = {span.kind for lane in lanes for row in lane.rows for span in row}
    return [*(kind for kind in COLOURS if kind in found), *sorted(found - set(COLOURS))]


def seconds_of(lanes: Iterable[Lane]) -> float:
    """Returns the seconds from the first span's beginning to the last one's end."""
    ends = [row[-1].end for lane in lanes for row in lane.rows]
    return max(ends, default=0.0) / 1e6


def _rows(events: Sequence[Mapping[str, Any]], origin: float) -> tuple[tuple[Span, ...], ...]:
    ordered = sorted(events, key=lambda event: (event["ts"], -event["dur"]))
    own = [event["dur"] for event in ordered]
    depths = []
    around: list[int] = []  # the open spans
    for i, event in enumerate(ordered):
        while around and _end(ordered[around[-1]]) <= event["ts"] + _SAME:
            around.pop()
        if around:
            own[around[-1]] -= event["dur"]
        depths.append(len(around))
        around.append(i)
    rows: list[list[Span]] = [[] for _ in range(max(depths) + 1)]
    for event, depth, left in zip(ordered, depths, own, strict=True):
        begin = max(0.0, event["ts"] - origin)
        rows[depth].append(Span(event["name"], event["cat"], begin, event["dur"], max(0.0, left)))
    return tuple(map(tuple, rows))


def _end(event: Mapping[str, Any]) -> float:
    return float(event["ts"] + event["dur"])
