"""Where time went as a table in HTML: what a notebook shows of a report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT = 560, 14  # of the bar, in pixels
_CELL = "text-align:{};padding:1px 10px 1px 0;border:0;background:none;color:inherit"


@dataclass(frozen=True)
class TablePart:
    """A line of the table: a share of the whole."""

    name: str
    seconds: float
    colour: str


def table_of(title: str, whole: float, parts: Sequence[TablePart], notes: Sequence[str]) -> str:
    """Returns a bar of the parts, a line for each, and the notes; nothing of it is a program.

    Colours of letters are those of the notebook, dark or light.
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
    """Returns the parts side by side; medians of each may be more than that of the whole."""
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
