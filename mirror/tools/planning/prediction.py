"""Prediction: the step of N devices, in each way of driving them.

[Note: Three ways]
What differs is who launches, and whether the reduction overlaps with the backward pass.

    way                 a process launches         reduction
    one process         each replica's step        in buckets, beside the backward pass
    compiled            2 N + 1 graphs             one, between the two graphs of each device
    process per device  one device's step          in buckets, beside the backward pass

A process drives the devices of one machine, so "one process" is one per machine where there are
several. The host runs ahead of its devices: the step takes as long as the slower of the two.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial

from mirror.tools.planning.all_reduce_cost import Cluster
from mirror.tools.planning.overlap import (
    Communication,
    after_backward,
    beside_backward,
    buckets_of,
)
from mirror.tools.planning.workload import Workload

ONE_PROCESS = "one process"
COMPILED = "compiled"
PROCESS_PER_DEVICE = "process per device"
WAYS = (ONE_PROCESS, COMPILED, PROCESS_PER_DEVICE)
"""From the simplest on."""

SCALINGS = ("weak", "strong")

GRAPH_LAUNCH_SECONDS = 10e-6
"""Of one graph or one grouped reduction in a compiled step. An assumption, not yet measured."""

ENOUGH = 1.05
"""A simpler way is enough if its step is at most this much of the best way's."""

_MUCH = 0.1  # of a step: so much exposed communication bounds it, and so little idle host


@dataclass(frozen=True)
class Row:
    """The prediction for one number of devices, in the simplest way that is enough.

    Attributes:
        devices: how many.
        machines: on how many machines.
        step_seconds: how long a step takes.
        examples_per_second: of all devices.
        efficiency: examples per second, as a share of ``devices`` times those of one alone.
        communication_seconds: of all reductions of the step.
        hidden_share: the share of them that the backward pass hides; ``None`` for one device.
        host_seconds: how long the busiest process takes to launch a step.
        bound_by: "compute", "communication" or "launches".
        way: one of ``WAYS``, see [Note: Three ways].
        seconds_by_way: the step in each of them.
    """

    devices: int
    machines: int
    step_seconds: float
    examples_per_second: float
    efficiency: float
    communication_seconds: float
    hidden_share: float | None
    host_seconds: float
    bound_by: str
    way: str
    seconds_by_way: dict[str, float]

    def to_dict(self) -> dict[str, object]:
        """Returns the attributes as plain values."""
        return asdict(self)


@dataclass(frozen=True)
class _Step:
    """A step in one way."""

    device_seconds: float
    host_seconds: float
    communication: Communication

    @property
    def seconds(self) -> float:
        return max(self.device_seconds, self.host_seconds)

    @property
    def bound_by(self) -> str:
        if self.host_seconds >= (1 - _MUCH) * self.seconds:
            return "launches"
        exposed = self.communication.exposed_seconds
        return "communication" if exposed > _MUCH * self.seconds else "compute"


@dataclass(frozen=True)
class Predictor:
    """Predicts the steps of a workload on a cluster.

    Attributes:
        workload: the step of one device.
        cluster: what the devices are connected by.
        scaling: "weak": every device has the batch of ``workload``; "strong": all together have.
        bucket_bytes: what a bucket holds at most.
    """

    workload: Workload
    cluster: Cluster
    scaling: str
    bucket_bytes: float

    def rows(self, max_devices: int) -> Iterator[Row]:
        """Yields the rows for 1, 2, 4, ... devices; with a batch to be shared, one example each.

        The largest number is there also where it is no power of two.
        """
        most = max_devices
        if self.scaling == "strong":
            most = min(most, self.workload.batch_size)
        number = 1
        while number < most:
            yield self.row(number)
            number *= 2
        yield self.row(most)

    def row(self, devices: int) -> Row:
        """Returns the prediction for so many devices."""
        steps = {way: self._step(devices, way) for way in WAYS}
        best = min(step.seconds for step in steps.values())
        way = next(way for way in WAYS if steps[way].seconds <= ENOUGH * best)
        step = steps[way]
        batches = devices if self.scaling == "weak" else 1
        alone = self.workload.step_seconds
        return Row(
            devices=devices,
            machines=self.cluster.num_machines(devices),
            step_seconds=step.seconds,
            examples_per_second=batches * self.workload.batch_size / step.seconds,
            efficiency=batches * alone / (devices * step.seconds),
            communication_seconds=step.communication.seconds,
            hidden_share=step.communication.hidden_share,
            host_seconds=step.host_seconds,
            bound_by=step.bound_by,
            way=way,
            seconds_by_way={name: steps[name].seconds for name in WAYS},
        )

    def _step(self, devices: int, way: str) -> _Step:
        work = self.workload
        part = 1.0 if self.scaling == "weak" else 1 / devices
        backward = work.backward_seconds(part)
        all_reduce = partial(self.cluster.all_reduce_seconds, num_devices=devices)
        if way == COMPILED:
            communication = after_backward(work.num_bytes, all_reduce)
        else:
            buckets = buckets_of(work.sizes_bytes, self.bucket_bytes)
            communication = beside_backward(buckets, backward, all_reduce)
        busy = work.busy_seconds(part)
        return _Step(
            busy + communication.exposed_seconds, self._host_seconds(devices, way), communication
        )

    def _host_seconds(self, devices: int, way: str) -> float:
        driven = min(devices, self.cluster.devices_per_machine)
        if way == COMPILED:
            return (2 * driven + 1) * GRAPH_LAUNCH_SECONDS
        return self.workload.host_seconds * (driven if way == ONE_PROCESS else 1)
