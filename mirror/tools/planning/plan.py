"""mirror.plan: from a step measured here to 1,024 devices, as a table, JSON and a picture."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mirror.base.safe_files import replace_atomically
from mirror.errors import short_repr
from mirror.tools.planning.prediction import (
    ALGORITHMS,
    COMPILED,
    ONE_PROCESS,
    PROCESS_PER_DEVICE,
    SCALINGS,
    WAYS,
    Cluster,
    Predictor,
    Row,
    link_between_devices,
    link_between_machines,
)
from mirror.tools.planning.workload import (
    OPTIMIZER_STATES,
    PlanError,
    Workload,
    check_number,
    check_plan_choice,
    check_plan_count,
    make_workload,
    measure,
    optimizer_state_of,
    sizes_of_model,
    sizes_of_numbers,
)

if TYPE_CHECKING:
    from mirror.strategy.strategy_base import Strategy

BUCKET_BYTES = 25 * 2**20
_WIRE_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def plan(
    measured: Strategy | Callable[[], object] | None = None,
    *,
    model: nn.Module | None = None,
    parameters: float | Sequence[float] | None = None,
    tensors: int | None = None,
    step_seconds: float | None = None,
    batch_size: int = 1,
    host_seconds: float | None = None,
    forward_share: float | None = None,
    update_seconds: float | None = None,
    link: str | Sequence[float] = "nvlink4",
    network: str | Sequence[float] = "8x400g",
    devices_per_machine: int = 8,
    max_devices: int = 1024,
    scaling: str = "weak",
    algorithm: str = "auto",
    bucket_bytes: float = BUCKET_BYTES,
    wire_dtype: torch.dtype | None = None,
    optimizer_state: str | None = None,
) -> Plan:
    """Predicts a step's time, throughput and efficiency on 1 to ``max_devices`` devices.

    ::

        print(mirror.plan(strategy, model=model, batch_size=64))  # from the steps it has taken
        print(mirror.plan(step_seconds=0.35, parameters=25.6e6, tensors=161, batch_size=128))

    docs/planning.md describes the model, its limits, and its errors against published figures. It
    has no stragglers and no slow input, so the predicted throughput is an upper bound.

    Args:
        measured: the source of the step: a strategy that has taken steps, or a function that runs
            one on one device and is called up to 33 times. Without it, ``step_seconds``.
        model: the model with the gradients to reduce. Without it, ``parameters``.
        parameters: the number of elements of each tensor, in order of registration, or of all.
        tensors: the number of tensors, if ``parameters`` is a sum; 100 by default.
        step_seconds: the step of one device alone, on its whole batch.
        batch_size: the examples of that step.
        host_seconds: the time in which the host launches it. Unless given, or measured on a GPU,
            it is 60 us for each tensor, at most the whole step.
        forward_share: the share of the forward pass in forward and backward; by default the
            measured one, or 1/3.
        update_seconds: the part of the step that the optimizer takes; by default the measured one,
            or 0.
        link: the link between the devices of a machine: "nvlink1" to "nvlink5", "pcie3" to
            "pcie5", or (gigabytes per second, microseconds per hop).
        network: the network between machines: adapters x Gbit/s as in "8x400g", or two numbers as
            for ``link``.
        devices_per_machine: the number of devices that one process can drive.
        max_devices: the largest number of devices.
        scaling: "weak": every device has ``batch_size`` examples; "strong": the devices share
            them, and forward and backward shrink in proportion.
        algorithm: "ring", "tree", "hierarchical", or "auto", the faster one of ring and tree.
        bucket_bytes: the capacity of a bucket, which is reduced at once.
        wire_dtype: the dtype of gradients on the wire; by default that of the parameters.
        optimizer_state: "replicated", or "sharded" over all devices, see
            ``MirroredStrategy``; by default that of the measured strategy.

    Raises:
        PlanError: a ``ValueError`` that names the argument and its value.
    """
    if model is not None and (parameters is not None or tensors is not None):
        raise PlanError("model has its parameters: leave out parameters= and tensors=")
    if wire_dtype is not None and not isinstance(wire_dtype, torch.dtype):
        raise PlanError(f"wire_dtype must be a torch.dtype, got {short_repr(wire_dtype)}")
    if model is not None:
        sizes = sizes_of_model(model, wire_dtype)
    elif parameters is not None:
        sizes = sizes_of_numbers(parameters, tensors, wire_dtype)
    else:
        raise PlanError("pass model=, or parameters=: the number of elements to reduce")
    cluster = Cluster(
        link=link_between_devices(link),
        network=link_between_machines(network),
        devices_per_machine=check_plan_count("devices_per_machine", devices_per_machine),
        algorithm=check_plan_choice("algorithm", algorithm, ALGORITHMS),
    )
    check_plan_choice("scaling", scaling, SCALINGS)
    if optimizer_state is None:
        optimizer_state = optimizer_state_of(measured)
    check_plan_choice("optimizer_state", optimizer_state, OPTIMIZER_STATES)
    bucket = check_number("bucket_bytes", bucket_bytes)
    most = check_plan_count("max_devices", max_devices)
    seen = measure(measured, model, step_seconds)
    workload = make_workload(
        step_seconds=seen.step_seconds,
        batch_size=batch_size,
        sizes_bytes=sizes,
        forward_share=seen.forward_share if forward_share is None else forward_share,
        update_seconds=seen.update_seconds if update_seconds is None else update_seconds,
        host_seconds=seen.host_seconds if host_seconds is None else host_seconds,
    )
    if scaling == "strong" and workload.batch_size == 1 and most > 1:
        raise PlanError("scaling='strong' shares one batch between the devices: pass batch_size=")
    shards = optimizer_state == "sharded"
    rows = tuple(Predictor(workload, cluster, scaling, bucket, shards).rows(most))
    sentences = advice(rows, cluster.devices_per_machine)
    return Plan(rows, workload, cluster, scaling, sentences, optimizer_state)


def make_plan(given: Mapping[str, Any], case: Mapping[str, Any]) -> Plan:
    """Returns the plan for a command line.

    Args:
        given: the arguments of ``plan`` by name, ``wire_dtype`` as a string; ``None``: not given.
        case: the arguments of a published step, for those that are not given.

    Raises:
        PlanError: ``plan`` raises it.
    """
    arguments = {**case, **{name: value for name, value in given.items() if value is not None}}
    if "wire_dtype" in arguments:
        arguments["wire_dtype"] = _WIRE_DTYPES[arguments["wire_dtype"]]
    for option, name in (("--host-ms", "host_seconds"), ("--update-ms", "update_seconds")):
        part, whole = arguments.get(name, 0.0), arguments.get("step_seconds", math.inf)
        if part > whole or (
            part == whole and name == "update_seconds"
        ):  # the error of plan would be in seconds
            raise PlanError(
                f"{option} is a part of the step of {1e3 * whole:g} ms (--step-ms, or that of "
                f"--case); got {1e3 * part:g}"
            )
    return plan(**arguments)


_KINDS = (".pdf", ".png", ".svg")


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
        rows, devices = self.rows, [row.devices for row in self.rows]
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
