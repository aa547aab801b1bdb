"""Pictures of times: a recorded trace as SVG and HTML, and the tables of reports.

A trace has a lane for each replica. A lane has spans, each below the one that contains it.
"""

from __future__ import annotations

import json
import math
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from mirror.base.safe_files import replace_atomically
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
from mirror.errors import StrategyError

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


_WIDTH, _HEIGHT = 560, 14  # of the bar, in pixels
_PAGE_WIDTH = 1200
_PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>
body {{ margin: 14px 18px; background: #fff; color: #24292f; font: 13px system-ui, sans-serif; }}
@media (prefers-color-scheme: dark) {{ body {{ background: #14181d; color: #e6edf3; }} }}
th, td {{ text-align: right; padding: 3px 12px 3px 0; font-weight: 500; }}
i {{ display: inline-block; width: 10px; height: 10px; margin-right: 6px; }}
</style>
</head>
<body>
<h1 style="font-size: 16px">{summary}</h1>
{picture}<table>
{table}
</table>
</body>
</html>
"""
_CELL = "text-align:{};padding:1px 10px 1px 0;border:0;background:none;color:inherit"


@dataclass(frozen=True)
class TablePart:
    """A row of the table: a share of the whole."""

    name: str
    seconds: float
    colour: str


def table_of(title: str, whole: float, parts: Sequence[TablePart], notes: Sequence[str]) -> str:
    """Returns a bar of the parts, a row for each, and the notes, without scripts.

    The text has the colour of the notebook, dark or light.
    """
    share = 1.0 / whole if whole > 0 else 0.0
    lines = [_line("whole step", whole, "100%" if whole > 0 else "", "transparent")]
    lines += [
        _line(p.name, p.seconds, f"{p.seconds * share:.0%}" if share else "", p.colour)
        for p in parts
    ]
    return "\n".join(
        [
            '<div style="font-size:13px;max-width:640px">',
            f"<div><b>{escape(title)}</b></div>",
            _bar(parts, share),
            '<table style="font-size:13px;border-collapse:collapse;border:0;margin:0">',
            *lines,
            "</table>",
            *(f'<div style="margin-top:2px">{escape(note)}</div>' for note in notes),
            "</div>",
        ]
    )


def _bar(parts: Sequence[TablePart], share: float) -> str:
    """Returns the parts in one bar; their medians may sum to more than that of the whole."""
    share = min(share, 1.0 / max(sum(part.seconds for part in parts), 1e-30))
    drawn, x = [], 0.0
    for part in parts:
        width = _WIDTH * part.seconds * share
        drawn.append(
            f'<rect x="{x:.1f}" width="{width:.1f}" height="{_HEIGHT}" fill="{part.colour}">'
            f"<title>{escape(part.name)}: {part.seconds * 1e3:,.3f} ms</title></rect>"
        )
        x += width
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" role="img" '
        'style="display:block;max-width:100%;margin:4px 0">'
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="currentColor" opacity=".1"/>'
        f"{''.join(drawn)}</svg>"
    )


def _line(name: str, seconds: float, share: str, colour: str) -> str:
    left, right = _CELL.format("left"), _CELL.format("right")
    square = (
        '<span style="display:inline-block;width:10px;height:10px;border-radius:2px;'
        f'margin-right:7px;background:{colour}"></span>'
    )
    return (
        f'<tr style="background:none"><td style="{left}">{square}{escape(name)}</td>'
        f'<td style="{right}">{seconds * 1e3:,.3f} ms</td><td style="{right}">{share}</td></tr>'
    )


def page_of(lanes: Sequence[Lane], *, title: str, summary: str) -> str:
    """Returns a page with the lanes of a trace and the time of each kind.

    It loads nothing, has no scripts, and depends only on the arguments.
    """
    return _PAGE.format(
        title=escape(title),
        summary=escape(summary),
        picture=svg_of(lanes, width=_PAGE_WIDTH, stand_alone=False),
        table=_own_times(lanes),
    )


def _own_times(lanes: Sequence[Lane]) -> str:
    """Returns the rows of a table: the milliseconds of each kind by lane, without inner spans."""
    kinds = kinds_of(lanes)
    heads = "".join(
        f'<th><i style="background:{COLOURS.get(kind, OTHER)}"></i>{escape(kind)}</th>'
        for kind in kinds
    )
    rows = [f"<tr><th>own time, ms</th>{heads}</tr>"]
    for lane in lanes:
        own = lane.own_by_kind()
        cells = "".join(
            f"<td>{own[kind] / 1e3:,.3f}</td>" if kind in own else "<td></td>" for kind in kinds
        )
        rows.append(f"<tr><th>{escape(lane.name)}</th>{cells}</tr>")
    return "\n".join(rows)


class Trace:
    """The spans recorded by ``strategy.trace(path)``, in a lane for each replica.

    ::

        with strategy.trace("step.json") as trace:
            train_step(batch)
        trace.to_html("step.html")

    A notebook shows the lanes. Times count from the first span. https://ui.perfetto.dev opens the
    file, to zoom and to search.

    Args:
        content: the content of the file; empty until the trace has ended.
    """

    def __init__(self, content: Mapping[str, Any]) -> None:
        self._content = content

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Trace:
        """Returns the trace in a file.

        Raises:
            OSError: the file cannot be read.
            ValueError: it holds no trace of a strategy.
        """
        try:
            trace = cls(json.loads(Path(path).read_text("utf-8")))
            trace._lanes()
        except (ValueError, LookupError, TypeError, AttributeError, StrategyError) as error:
            raise ValueError(
                f"'{os.fspath(path)}' holds no trace of a strategy ({error!r}); take one with: "
                "with strategy.trace(path): ..."
            ) from None
        return trace

    @property
    def seconds(self) -> float:
        """The seconds from the beginning of the first span to the end of the last one."""
        return seconds_of(self._lanes())

    @property
    def hidden_share(self) -> float | None:
        """The hidden share of the reductions' time; ``None`` without reductions."""
        self._check_ended()
        share: float | None = self._content["otherData"]["hidden_share_of_communication"]
        return share

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Writes a page with the lanes, and a table of the time of each kind.

        The name and time of a span appear when the mouse points at it. The page needs no network,
        and has dark or light colours as the reader prefers. The same trace gives the same bytes.

        Raises:
            StrategyError: the trace has not ended.
            OSError: the file cannot be written.
        """
        summary = self._summary()
        _write(path, page_of(self._lanes(), title=f"mirror: {summary}", summary=summary))

    def to_svg(self, path: str | os.PathLike[str], *, width: int = 880) -> None:
        """Writes the lanes of a few steps as a picture for a document.

        Args:
            width: the width of the picture, in pixels.

        Raises:
            StrategyError: the trace has not ended.
            ValueError: the width is too small for lanes and their names.
            OSError: the file cannot be written.
        """
        if isinstance(width, bool) or not isinstance(width, int) or width < 300:
            raise ValueError(f"width= is a whole number from 300 on; got {width!r}")
        _write(path, svg_of(self._lanes(), width=width, stand_alone=True))

    def _repr_html_(self) -> str | None:
        if not self._content:
            return None  # notebooks show its repr
        return svg_of(self._lanes(), width=880, stand_alone=False)

    def __repr__(self) -> str:
        return f"Trace({self._summary() if self._content else 'is being taken'})"

    def _summary(self) -> str:
        lanes = self._lanes()
        num_spans = sum(len(row) for lane in lanes for row in lane.rows)
        summary = f"{num_spans:,} spans in {len(lanes)} lanes, {1e3 * self.seconds:,.3f} ms"
        hidden = self.hidden_share
        if hidden is None:
            return summary
        return f"{summary}; {hidden:.0%} of the reductions' time was hidden"

    def _lanes(self) -> tuple[Lane, ...]:
        self._check_ended()
        return lanes_of(self._content["traceEvents"])

    def _check_ended(self) -> None:
        if not self._content:
            raise StrategyError(
                "the trace is being taken still; look at it after the with statement of "
                "strategy.trace has ended"
            )


def _write(path: str | os.PathLike[str], text: str) -> None:
    with replace_atomically(path) as file:
        file.write(text.encode())
