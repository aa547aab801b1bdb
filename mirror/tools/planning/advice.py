"""Advice: up to how many devices one process is enough, and what to use then."""

from __future__ import annotations

from collections.abc import Sequence

from mirror.tools.planning.prediction import COMPILED, ONE_PROCESS, PROCESS_PER_DEVICE, Row

_PER_DEVICE = (
    "one process per device: torchrun with mirror.MultiWorkerMirroredStrategy, or PyTorch's "
    "DistributedDataParallel"
)
_SEVERAL = (
    "Beyond the {most} of a machine, one process per machine: torchrun with "
    "mirror.MultiWorkerMirroredStrategy."
)


def advice(rows: Sequence[Row], devices_per_machine: int) -> tuple[str, ...]:
    """Returns sentences: on processes first, then on communication.

    Args:
        rows: for rising numbers of devices, the first of them for 1.
        devices_per_machine: what one process can drive.
    """
    inside = [row for row in rows if row.devices <= devices_per_machine]
    sentences = [_on_processes(inside)]
    if len(inside) < len(rows):
        sentences.append(_on_machines(rows[len(inside) :], devices_per_machine))
    return (*sentences, *_on_communication(rows))


def _on_processes(rows: Sequence[Row]) -> str:
    """What to use on one machine."""
    number = next((i for i, row in enumerate(rows) if row.way != ONE_PROCESS), len(rows))
    if number == len(rows):
        return (
            f"One process is enough for {_devices(rows[-1].devices)}: it launches a step in "
            f"{_ms(rows[-1].host_seconds)} of {_ms(rows[-1].step_seconds)}."
        )
    enough, first = rows[number - 1], rows[number]
    sentence = (
        f"One process is enough up to {_devices(enough.devices)}; for {first.devices} its "
        f"launches alone make a step of {_ms(first.seconds_by_way[ONE_PROCESS])} out of "
        f"{_ms(first.step_seconds)}."
    )
    instead = {row.way for row in rows[number:]}
    if COMPILED in instead:
        compiled = [row.devices for row in rows[number:] if row.way == COMPILED]
        sentence += f" Use compiled steps then (strategy.compile), for {_range(compiled)}."
    if PROCESS_PER_DEVICE in instead:
        processes = [row.devices for row in rows[number:] if row.way == PROCESS_PER_DEVICE]
        sentence += f" Use {_PER_DEVICE}, for {_range(processes)}."
    return sentence


def _on_machines(rows: Sequence[Row], devices_per_machine: int) -> str:
    """What to use on several machines."""
    ways = {row.way for row in rows}
    if ways == {PROCESS_PER_DEVICE}:
        return f"Beyond the {devices_per_machine} of a machine, {_PER_DEVICE}."
    sentence = _SEVERAL.format(most=devices_per_machine)
    if ways != {ONE_PROCESS}:
        first = next(row for row in rows if row.way != ONE_PROCESS)
        compiled = "its steps compiled" if first.way == COMPILED else "one process per device"
        sentence += f" From {first.devices} devices on: {compiled}."
    return sentence


def _on_communication(rows: Sequence[Row]) -> tuple[str, ...]:
    bound = [row for row in rows if row.bound_by == "communication"]
    if not bound:
        return ()
    first = bound[0]
    hidden = first.hidden_share or 0.0
    return (
        f"From {first.devices} devices on communication holds the step up: it takes "
        f"{_ms(first.communication_seconds)}, and backward hides {hidden:.0%} of it. Larger "
        "batches, strategy.no_sync() between updates, or "
        "CommunicationOptions(wire_dtype=torch.bfloat16) make it matter less.",
    )


def _devices(number: int) -> str:
    return f"{number} device{'' if number == 1 else 's'}"


def _range(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return _devices(numbers[0])
    return f"{numbers[0]} to {numbers[-1]} devices"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
