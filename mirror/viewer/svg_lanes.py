"""The lanes of a trace as an SVG: one picture, for documents and notebooks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

from mirror.viewer.trace_lanes import COLOURS, OTHER, Lane, Span, kinds_of, seconds_of

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
