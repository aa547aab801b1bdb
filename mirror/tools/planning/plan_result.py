"""A picture of a plan: step time and efficiency over the number of devices.

Plan: what a step would be on more devices, as rows, a table, JSON and a picture.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from mirror.base.atomic_file import replace_atomically
from mirror.tools.planning.all_reduce_cost import Cluster
from mirror.tools.planning.plan_error import PlanError
from mirror.tools.planning.prediction import WAYS, Row
from mirror.tools.planning.workload import Workload

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


_HEADINGS = ("devices", "step ms", "examples/s", "efficiency", "hidden", "bound by", "way", *WAYS)


@dataclass(frozen=True)
class Plan:
    """What a step would be on more devices; ``str(plan)`` is a table, with advice below.

    Attributes:
        rows: one for each number of devices.
        workload: the step of one device.
        cluster: what the devices are connected by.
        scaling: "weak" or "strong".
        advice: up to how many devices one process is enough, what to use then, and what limits.
    """

    rows: tuple[Row, ...]
    workload: Workload
    cluster: Cluster
    scaling: str
    advice: tuple[str, ...]

    def to_dict(self) -> dict[str, object]:
        """Returns everything as plain values."""
        return asdict(self)

    def to_json(self) -> str:
        """Returns everything as JSON, for machines."""
        return json.dumps(self.to_dict(), indent=2)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draws step time and efficiency; wants matplotlib (``mirror-strategy[bench]``).

        Raises:
            PlanError: there is no matplotlib, or the path ends in none of .pdf, .png, .svg.
            OSError: the file cannot be written.
        """
        draw(path, self.rows)

    def __str__(self) -> str:
        cells = [_HEADINGS, *map(_cells, self.rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = [
            "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
            for row in cells
        ]
        return "\n".join([*_head(self), "", *lines, "", *self.advice])


def _head(plan: Plan) -> list[str]:
    work, cluster = plan.workload, plan.cluster
    known = "" if work.host_is_known else ", estimated"
    batch = "on each device" if plan.scaling == "weak" else "shared by all devices"
    return [
        f"one device    {1e3 * work.step_seconds:.4g} ms a step of {work.batch_size} examples; "
        f"{1e3 * work.host_seconds:.3g} ms to launch it{known}",
        f"scaling       {plan.scaling}: that batch {batch}",
        f"gradients     {work.num_bytes / 1e6:,.1f} MB in {len(work.sizes_bytes)} tensors",
        f"machines      of {cluster.devices_per_machine}; {_speed(cluster.link.name)}"
        f"{cluster.link.bytes_per_second / 1e9:g} GB/s inside, {_speed(cluster.network.name)}"
        f"{cluster.network.bytes_per_second / 1e9:g} GB/s between; {cluster.algorithm}",
    ]


def _speed(name: str) -> str:
    return "" if " " in name else f"{name}, "  # one that was given is called by its numbers


def _cells(row: Row) -> tuple[str, ...]:
    return (
        f"{row.devices:,}",
        _ms(row.step_seconds),
        f"{row.examples_per_second:,.4g}"
        if row.examples_per_second < 1e4
        else f"{row.examples_per_second:,.0f}",
        f"{row.efficiency:.1%}",
        "-" if row.hidden_share is None else f"{row.hidden_share:.0%}",
        row.bound_by,
        row.way,
        *(_ms(row.seconds_by_way[way]) for way in WAYS),
    )


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.4g}"
