"""The lanes of a trace as a page of its own: to move in, and to point at."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path

from mirror.viewer.trace_lanes import COLOURS, OTHER, Lane, kinds_of

_TEMPLATE = Path(__file__).with_name("page.html")


def page_of(lanes: Sequence[Lane], *, title: str, summary: str) -> str:
    """Returns the page; what is in it depends on nothing but the arguments.

    It asks no other file or machine for anything, and forbids browsers to do so.
    """
    filled = {
        "TITLE": escape(title),
        "SUMMARY": escape(summary),
        "TABLE": _table(lanes),
        "DATA": _data(lanes),
    }
    return re.sub(r"@([A-Z]+)@", lambda found: filled[found[1]], _TEMPLATE.read_text("ascii"))


def _data(lanes: Sequence[Lane]) -> str:
    """Returns what the page's program draws; spans as [begin, length, name's number, kind's]."""
    kinds, names = kinds_of(lanes), dict[str, int]()
    drawn = [
        {
            "name": lane.name,
            "rows": [
                [
                    [
                        round(span.begin, 2),
                        round(span.length, 2),
                        names.setdefault(span.name, len(names)),
                        kinds.index(span.kind),
                    ]
                    for span in row
                ]
                for row in lane.rows
            ],
        }
        for lane in lanes
    ]
    found = {
        "lanes": drawn,
        "names": list(names),
        "kinds": [[kind, COLOURS.get(kind, OTHER)] for kind in kinds],
    }
    # ASCII, and without what could end the element of the page that it stands in.
    return json.dumps(found, separators=(",", ":")).replace("<", "\\u003c")


def _table(lanes: Sequence[Lane]) -> str:
    """Returns each kind's own milliseconds by lane: what is told without the page's program."""
    kinds = kinds_of(lanes)
    heads = "".join(
        f'<th><i style="background:{COLOURS.get(kind, OTHER)}"></i>{escape(kind)}</th>'
        for kind in kinds
    )
    lines = [f"<tr><th>own time, ms</th>{heads}</tr>"]
    for lane in lanes:
        own = lane.own_by_kind()
        cells = "".join(
            f"<td>{own[kind] / 1e3:,.3f}</td>" if kind in own else "<td></td>" for kind in kinds
        )
        lines.append(f"<tr><th>{escape(lane.name)}</th>{cells}</tr>")
    return "\n".join(lines)
