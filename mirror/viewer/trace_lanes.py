"""The lanes of a trace: the spans of a replica, each below the one that contains it; and as SVG.

The SVG is one picture, for documents and notebooks.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
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


FONT = "font-family:system-ui,-apple-system,Segoe UI,Helvetica,Arial,sans-serif"
_STAND_ALONE = """\
<style>svg{color:#24292f}.paper{fill:#fff}@media(prefers-color-scheme:dark){svg{color:#e6edf3}\
.paper{fill:#14181d}}</style>
<rect class="paper" width="100%" height="100%" rx="6"/>"""
_ROW, _GAP, _AXIS, _LEGEND = 22, 12, 24, 22  # heights
_LABELS, _MARGIN = 186, 12  # widths
_LETTER = 6.3  # about the width of a letter of a span's name
_TICKS = 8


def svg_of(lanes: Sequence[Lane], *, width: int, stand_alone: bool) -> str:
    """Returns the picture, with times above and a legend below.

    Args:
        width: the width in pixels; the height follows from the lanes.
        stand_alone: whether it is a file, with dark or light text as the reader prefers. Otherwise
            the text has the colour of the page.
    """
    legend = list(_legend(kinds_of(lanes), width))
    top = _AXIS
    body: list[str] = []
    whole = max(seconds_of(lanes) * 1e6, 1e-9)
    scale = (width - _LABELS - _MARGIN) / whole
    for lane in lanes:
        body += _lane(lane, top, scale)
        top += _ROW * len(lane.rows) + _GAP
    if not lanes:
        body.append(f'<text x="{_MARGIN}" y="{top + 14}">nothing happened</text>')
        top += _ROW
    axis = _axis(whole, scale, top - _GAP // 2) if lanes else ()
    num_lines = max((line for line, *_ in legend), default=-1) + 1
    height = top + _LEGEND * num_lines + _MARGIN // 2
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img" fill="currentColor" '
            f'style="{FONT};font-size:12px;max-width:100%;height:auto">',
            "<title>What each lane did, over time</title>",
            *([_STAND_ALONE] if stand_alone else ()),
            *axis,
            *body,
            *(
                f'<rect x="{x}" y="{top + _LEGEND * line + 2}" width="12" height="12" rx="2" '
                f'fill="{COLOURS.get(kind, OTHER)}"/><text x="{x + 17}" '
                f'y="{top + _LEGEND * line + 12}">{escape(kind)}</text>'
                for line, x, kind in legend
            ),
            "</svg>\n",
        ]
    )


def ticks(whole: float, at_most: int) -> list[float]:
    """Returns round numbers from 0 to ``whole``: a 1, 2 or 5 before zeros, and its multiples."""
    power = 10.0 ** math.floor(math.log10(whole / at_most))
    step = next(f * power for f in (1, 2, 5, 10, 20) if whole / (f * power) <= at_most)
    return [i * step for i in range(int(whole / step + 1e-9) + 1)]


def _axis(whole: float, scale: float, bottom: int) -> Iterator[str]:
    marks = ticks(whole, _TICKS)
    unit, name = (1e3, "ms") if marks[-1] >= 1e3 else (1.0, "us")
    for number, mark in enumerate(marks):
        x = f"{_LABELS + mark * scale:.1f}"
        words = f"{mark / unit:g}" + ("" if number else f" {name}")
        yield (
            f'<path d="M{x} {_AXIS - 6}V{bottom}" stroke="currentColor" opacity=".18"/>'
            f'<text x="{x}" y="{_AXIS - 10}" font-size="11" opacity=".75">{words}</text>'
        )


def _lane(lane: Lane, top: int, scale: float) -> Iterator[str]:
    yield f'<text x="{_MARGIN}" y="{top + 15}">{escape(lane.name)}</text>'
    for row, spans in enumerate(lane.rows):
        drawn = -1.0  # the last drawn pixel; of several spans in one pixel, one is drawn
        for span in spans:
            if span.end * scale >= drawn + 1:
                drawn = span.end * scale
                yield _span(span, top + _ROW * row, scale)


def _span(span: Span, top: int, scale: float) -> str:
    x, width = _LABELS + span.begin * scale, max(span.length * scale, 0.6)
    num_letters = int((width - 8) / _LETTER)
    words = span.name if len(span.name) <= num_letters else span.name[: num_letters - 2] + ".."
    place = f'x="{x + 4:.1f}" y="{top + 14}" font-size="11" fill="#16181b"'
    label = f"<text {place}>{escape(words)}</text>" if num_letters >= 4 else ""
    return (
        f'<g><title>{escape(span.words)}</title><rect x="{x:.1f}" y="{top}" width="{width:.1f}" '
        f'height="{_ROW - 2}" rx="2" fill="{COLOURS.get(span.kind, OTHER)}"/>{label}</g>'
    )


def _legend(kinds: Sequence[str], width: int) -> Iterator[tuple[int, int, str]]:
    """Yields the line and the x of each kind; lines are broken where the picture ends."""
    line, x = 0, _MARGIN
    for kind in kinds:
        needed = 34 + int(6.2 * len(kind))
        if x > _MARGIN and x + needed > width:
            line, x = line + 1, _MARGIN
        yield line, x, kind
        x += needed
