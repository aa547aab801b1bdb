"""Plan: the predicted steps as rows, a table with advice, JSON and a picture."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from mirror.base.safe_files import replace_atomically
from mirror.tools.planning.all_reduce_cost import Cluster
from mirror.tools.planning.prediction import COMPILED, ONE_PROCESS, PROCESS_PER_DEVICE, WAYS, Row
from mirror.tools.planning.workload import PlanError, Workload

_KINDS = (".pdf", ".png", ".svg")


def draw(path: str | os.PathLike[str], rows: Sequence[Row]) -> None:
    """Draws the rows of a plan with matplotlib, which the extra "bench" installs.

    Raises:
        PlanError: matplotlib is not installed, or the path does not end in .pdf, .png or .svg.
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
    for way, style in zip(WAYS, ("-", "--", ":"), strict=True):  # lines may coincide
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
    """The predicted steps; ``str(plan)`` is a table, with advice below.

    Attributes:
        rows: the prediction for each number of devices.
        workload: the step of one device.
        cluster: the machines, with their links and network.
        scaling: "weak" or "strong".
        advice: sentences: how many devices one process can drive, what to use beyond that, and
            what limits the step.
        optimizer_state: "replicated" or "sharded".
    """

    rows: tuple[Row, ...]
    workload: Workload
    cluster: Cluster
    scaling: str
    advice: tuple[str, ...]
    optimizer_state: str = "replicated"

    def to_dict(self) -> dict[str, object]:
        """Returns everything as plain values."""
        return asdict(self)

    def to_json(self) -> str:
        """Returns everything as JSON, for machines."""
        return json.dumps(self.to_dict(), indent=2)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draws step time and efficiency with matplotlib (``mirror-strategy[bench]``).

        Raises:
            PlanError: matplotlib is not installed, or the path does not end in .pdf, .png or .svg.
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
    is_sharded = plan.optimizer_state == "sharded"
    batch = "on each device" if plan.scaling == "weak" else "shared by all devices"
    return [
        f"one device    {1e3 * work.step_seconds:.4g} ms a step of {work.batch_size} examples; "
        f"{1e3 * work.host_seconds:.3g} ms to launch it{known}",
        f"scaling       {plan.scaling}: that batch {batch}",
        f"gradients     {work.num_bytes / 1e6:,.1f} MB in {len(work.sizes_bytes)} tensors",
        f"machines      of {cluster.devices_per_machine}; {_speed(cluster.link.name)}"
        f"{cluster.link.bytes_per_second / 1e9:g} GB/s inside, {_speed(cluster.network.name)}"
        f"{cluster.network.bytes_per_second / 1e9:g} GB/s between; {cluster.algorithm}",
        *(["optimizer     state sharded over all devices"] if is_sharded else []),
    ]


def _speed(name: str) -> str:
    return "" if " " in name else f"{name}, "  # a link given by numbers has them as its name


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


_PER_DEVICE = (
    "one process per device: torchrun with mirror.MultiWorkerMirroredStrategy, or PyTorch's "
    "DistributedDataParallel"
)
_SEVERAL = (
    "Beyond the {most} of a machine, one process per machine: torchrun with "
    "mirror.MultiWorkerMirroredStrategy."
)


def advice(rows: Sequence[Row], devices_per_machine: int) -> tuple[str, ...]:
    """Returns sentences about processes, then about communication.

    Args:
        rows: the predictions for rising numbers of devices, from 1 on.
        devices_per_machine: the devices that one process can drive.
    """
    inside = [row for row in rows if row.devices <= devices_per_machine]
    sentences = [_advise_processes(inside)]
    if len(inside) < len(rows):
        sentences.append(_advise_machines(rows[len(inside) :], devices_per_machine))
    return (*sentences, *_advise_communication(rows))


def _advise_processes(rows: Sequence[Row]) -> str:
    number = next((i for i, row in enumerate(rows) if row.way != ONE_PROCESS), len(rows))
    if number == len(rows):
        return (
            f"One process is enough for {_devices(rows[-1].devices)}: it launches a step in "
            f"{_milliseconds(rows[-1].host_seconds)} of {_milliseconds(rows[-1].step_seconds)}."
        )
    enough, first = rows[number - 1], rows[number]
    sentence = (
        f"One process is enough up to {_devices(enough.devices)}; for {first.devices} its "
        f"launches alone make a step of {_milliseconds(first.seconds_by_way[ONE_PROCESS])} out of "
        f"{_milliseconds(first.step_seconds)}."
    )
    instead = {row.way for row in rows[number:]}
    if COMPILED in instead:
        compiled = [row.devices for row in rows[number:] if row.way == COMPILED]
        sentence += f" Use compiled steps then (strategy.compile), for {_range(compiled)}."
    if PROCESS_PER_DEVICE in instead:
        processes = [row.devices for row in rows[number:] if row.way == PROCESS_PER_DEVICE]
        sentence += f" Use {_PER_DEVICE}, for {_range(processes)}."
    return sentence


def _advise_machines(rows: Sequence[Row], devices_per_machine: int) -> str:
    ways = {row.way for row in rows}
    if ways == {PROCESS_PER_DEVICE}:
        return f"Beyond the {devices_per_machine} of a machine, {_PER_DEVICE}."
    sentence = _SEVERAL.format(most=devices_per_machine)
    if ways != {ONE_PROCESS}:
        first = next(row for row in rows if row.way != ONE_PROCESS)
        compiled = "its steps compiled" if first.way == COMPILED else "one process per device"
        sentence += f" From {first.devices} devices on: {compiled}."
    return sentence


def _advise_communication(rows: Sequence[Row]) -> tuple[str, ...]:
    bound = [row for row in rows if row.bound_by == "communication"]
    if not bound:
        return ()
    first = bound[0]
    hidden = first.hidden_share or 0.0
    return (
        f"From {first.devices} devices on communication holds the step up: it takes "
        f"{_milliseconds(first.communication_seconds)}, and backward hides {hidden:.0%} of it. "
        "Larger batches, strategy.no_sync() between updates, or "
        "CommunicationOptions(wire_dtype=torch.bfloat16) make it matter less.",
    )


def _devices(number: int) -> str:
    return f"{number} device{'' if number == 1 else 's'}"


def _range(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return _devices(numbers[0])
    return f"{numbers[0]} to {numbers[-1]} devices"


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
