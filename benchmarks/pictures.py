"""Draws measurements, with a caption that names the machine."""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Sequence
from datetime import date
from typing import Any

import torch

import mirror
from mirror.devices import are_distinct, is_simulated, model_name

KIB = 2**10


def caption_of(devices: Sequence[torch.device]) -> str:
    """Returns the devices (or "simulated"), the machine, the versions and the date."""
    names = Counter(
        model_name(device) for device in dict.fromkeys(devices) if device.type != "cpu"
    )
    gpus = ", ".join(f"{count} x {name}" for name, count in names.items())
    where = gpus or "the CPU"
    if is_simulated(devices) or not are_distinct(devices):
        where = f"simulated devices on {where}"
    versions = f"mirror {mirror.__version__}, torch {torch.__version__}"
    return f"{where}; {machine()}\n{versions}, Python {platform.python_version()}; {date.today()}"


def machine() -> str:
    """Returns the processor's name, and how many there are."""
    with open("/proc/cpuinfo") as file:
        names = [line.split(":")[1].strip() for line in file if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} CPUs"


def finish(figure: Any, caption: str) -> None:
    """Puts the caption below all panels."""
    figure.supxlabel(caption, fontsize="small", color="dimgray")


def bandwidths(rows: Sequence[Any], caption: str) -> Any:
    """Returns a figure of busbw over the size, a panel for each number of replicas.

    Args:
        rows: ``all_reduce.Row``.
    """
    from matplotlib.figure import Figure

    replicas = sorted({row.n for row in rows})
    figure = Figure(figsize=(max(4.5 * len(replicas), 6.5), 4.3), layout="constrained")
    panels = figure.subplots(1, len(replicas), squeeze=False, sharey=True)[0]
    for panel, n in zip(panels, replicas, strict=True):
        panel.set(title=f"{n} replicas", xlabel="KiB of each replica", xscale="log", yscale="log")
        for name in dict.fromkeys(row.name for row in rows if row.n == n):
            points = [(r.bytes / KIB, r.busbw) for r in rows if (r.n, r.name) == (n, name)]
            if all(busbw for _, busbw in points):
                panel.plot(*zip(*points, strict=True), marker=".", label=name)
        sizes = sorted({row.bytes / KIB for row in rows if row.n == n})
        panel.set_xticks(sizes, [f"{size:,.10g}" for size in sizes], fontsize="small")
        panel.minorticks_off()
        panel.grid(alpha=0.3)
        if panel.lines:
            panel.legend(fontsize="small")
    panels[0].set_ylabel("bus bandwidth, GB/s")
    finish(figure, caption)
    return figure
