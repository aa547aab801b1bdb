"""A picture of a plan: step time and efficiency over the number of devices."""

from __future__ import annotations

import os
from collections.abc import Sequence

from mirror.files import replace_atomically
from mirror.train.planning.errors import PlanError
from mirror.train.planning.prediction import WAYS, Row

_KINDS = (".pdf", ".png", ".svg")


def draw(path: str | os.PathLike[str], rows: Sequence[Row]) -> None:
    """Draws the rows of a plan; wants matplotlib, which the extra "bench" brings.

    Raises:
        PlanError: there is no matplotlib, or the path ends in none of .pdf, .png, .svg.
        OSError: the file cannot be written.
    """
    kind = os.path.splitext(path)[1]
    if kind not in _KINDS:
        raise PlanError(f"a picture's path ends in one of {', '.join(_KINDS)}; got '{path}'")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise PlanError(
            "a picture needs matplotlib; run: pip install 'mirror-strategy[bench]'"
        ) from None
    figure = Figure(figsize=(9.0, 3.6), layout="constrained")
    steps, shares = (figure.add_subplot(1, 2, i) for i in (1, 2))
    devices = [row.devices for row in rows]
    for way, style in zip(WAYS, ("-", "--", ":"), strict=True):  # lines may lie on each other
        times = [1e3 * row.seconds_by_way[way] for row in rows]
        steps.plot(devices, times, style, marker=".", label=way)
    steps.set(xlabel="devices", ylabel="ms per step", xscale="log")
    steps.set_ylim(bottom=0)
    steps.legend(fontsize="small")
    shares.plot(devices, [row.efficiency for row in rows], marker=".", label="efficiency")
    hidden = [(row.devices, row.hidden_share) for row in rows if row.hidden_share is not None]
    if hidden:
        shares.plot(*zip(*hidden, strict=True), marker=".", label="communication hidden")
    shares.set(xlabel="devices", xscale="log", ylim=(0.0, 1.05))
    shares.legend(fontsize="small")
    for panel in (steps, shares):
        panel.set_xticks(devices, map(str, devices), fontsize="small", rotation=45)
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    with replace_atomically(path) as file:
        figure.savefig(file, dpi=120, format=kind[1:])
