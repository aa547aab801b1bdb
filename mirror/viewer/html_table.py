"""Times as HTML: the table of a report in a notebook, and the page of a trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from mirror.viewer.trace_lanes import COLOURS, OTHER, Lane, kinds_of, svg_of

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
