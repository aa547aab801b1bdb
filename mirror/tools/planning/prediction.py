"""Prediction of the step of N devices, in each way of driving them.

The ways differ in the process that launches, and in the overlap of reduction and backward pass.

    way                 a process launches         reduction
    one process         the step of each replica   in buckets, overlapped with the backward pass
    compiled            2 N + 1 graphs             one, between the two graphs of each device
    process per device  the step of one device     in buckets, overlapped with the backward pass

A process drives the devices of one machine; on several machines "one process" means one per
machine. The host runs ahead of its devices: a step takes as long as the slower of the two.

Buckets are reduced while the backward pass produces the next ones::

    forward  | backward 1   2     3      4 | update
    channel  |          [ 1  ][ 2 ][ 3 ]   [ 4 ]
                                           exposed

Gradients arrive in reverse order of registration, each after an equal share of the backward pass.
A bucket is closed when the next gradient does not fit; a gradient larger than a bucket has its
own. There is one channel: it reduces one bucket at a time, in order.

With sharded optimizer state one process reduces each bucket to the devices that update it, which
takes half as long, and gathers the new values after the update, which takes the other half. A
device updates 1/N of the parameters, N being all devices. Several machines reduce all gradients to
all devices. The other ways keep the state as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial

from mirror.tools.planning.all_reduce_cost import Cluster
from mirror.tools.planning.workload import Workload

AllReduce = Callable[[float], float]
"""Returns the time of an all-reduce of a number of bytes."""


@dataclass(frozen=True)
class Communication:
    """The time of the reductions of one step.

    Attributes:
        seconds: the time of all of them.
        exposed_seconds: the time that remains after the backward pass.
    """

    seconds: float
    exposed_seconds: float

    @property
    def hidden_share(self) -> float | None:
        """The share that the backward pass hides; ``None`` where nothing is reduced."""
        return 1 - self.exposed_seconds / self.seconds if self.seconds else None


def buckets_of(sizes_bytes: Sequence[float], bucket_bytes: float) -> list[tuple[float, float]]:
    """Returns the buckets in the order of their reduction.

    Args:
        sizes_bytes: the bytes of each gradient, in order of registration.
        bucket_bytes: the capacity of a bucket.

    Returns:
        The time when each is complete, as a share of the backward pass, and its bytes.
    """
    buckets: list[tuple[float, float]] = []
    held = 0.0
    for number, size in enumerate(reversed(sizes_bytes)):
        if held and held + size > bucket_bytes:
            buckets.append((number / len(sizes_bytes), held))
            held = 0.0
        held += size
    if held:
        buckets.append((1.0, held))
    return buckets


def reduce_during_backward(
    buckets: Sequence[tuple[float, float]], backward_seconds: float, all_reduce: AllReduce
) -> Communication:
    """Returns the communication of buckets that are reduced as soon as they are complete."""
    free = total = 0.0
    for arrived, num_bytes in buckets:
        seconds = all_reduce(num_bytes)
        free = max(free, arrived * backward_seconds) + seconds
        total += seconds
    return _communication(total, free - backward_seconds)


def reduce_after_backward(num_bytes: float, all_reduce: AllReduce) -> Communication:
    """Returns the communication of one reduction after the backward pass."""
    seconds = all_reduce(num_bytes) if num_bytes else 0.0
    return _communication(seconds, seconds)


def _communication(seconds: float, exposed: float) -> Communication:
    return Communication(seconds, min(seconds, max(0.0, exposed)))


ONE_PROCESS = "one process"
COMPILED = "compiled"
PROCESS_PER_DEVICE = "process per device"
WAYS = (ONE_PROCESS, COMPILED, PROCESS_PER_DEVICE)
"""The ways, the simplest first."""

SCALINGS = ("weak", "strong")

GRAPH_LAUNCH_SECONDS = 10e-6
"""The launch of a graph or grouped reduction of a compiled step; assumed, not measured."""

ENOUGH = 1.05
"""A simpler way is chosen if its step takes at most this multiple of the fastest step."""

_MUCH = 0.1  # the share of a step from which communication or launches bound it


@dataclass(frozen=True)
class Row:
    """The prediction for one number of devices, in the simplest way that is enough.

    Attributes:
        devices, machines: the numbers of devices and machines.
        step_seconds: the time of a step.
        examples_per_second: the throughput of all devices.
        efficiency: the throughput as a share of ``devices`` times that of one device.
        communication_seconds: the time of all reductions of the step.
        hidden_share: the share of it that the backward pass hides; ``None`` for one device.
        host_seconds: the time in which the busiest process launches a step.
        bound_by: "compute", "communication" or "launches".
        way: one of ``WAYS``.
        seconds_by_way: the time of a step in each way.
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
        cluster: the machines, with their links and network.
        scaling: "weak": every device has the batch of ``workload``; "strong": they share it.
        bucket_bytes: the capacity of a bucket.
        shards_state: whether the devices share the optimizer state.
    """

    workload: Workload
    cluster: Cluster
    scaling: str
    bucket_bytes: float
    shards_state: bool = False

    def rows(self, max_devices: int) -> Iterator[Row]:
        """Yields the rows for 1, 2, 4, ... and ``max_devices`` devices.

        Devices that share a batch have at least one example each.
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
        """Returns the prediction for a number of devices."""
        steps = {way: self._step(devices, way) for way in WAYS}
        best = min(step.seconds for step in steps.values())
        fitting = (way for way in WAYS if steps[way].seconds <= ENOUGH * best)
        way = ONE_PROCESS if self.shards_state else next(fitting)  # no other way has shards
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
            communication = reduce_after_backward(work.num_bytes, all_reduce)
        else:
            buckets = buckets_of(work.sizes_bytes, self.bucket_bytes)
            communication = reduce_during_backward(buckets, backward, all_reduce)
        busy = work.busy_seconds(part)
        if self.shards_state and way == ONE_PROCESS:
            return self._sharded_step(devices, part)
        return _Step(
            busy + communication.exposed_seconds, self._host_seconds(devices, way), communication
        )

    def _sharded_step(self, devices: int, part: float) -> _Step:
        """Returns the step of one process with sharded optimizer state."""
        work = self.workload
        all_reduce = partial(self.cluster.all_reduce_seconds, num_devices=devices)
        is_one = devices <= self.cluster.devices_per_machine

        def reduce(num_bytes: float) -> float:
            return all_reduce(num_bytes) / 2 if is_one else all_reduce(num_bytes)

        buckets = buckets_of(work.sizes_bytes, self.bucket_bytes)
        reduced = reduce_during_backward(buckets, work.backward_seconds(part), reduce)
        gather = all_reduce(work.num_bytes) / 2 if work.num_bytes else 0.0
        communication = Communication(reduced.seconds + gather, reduced.exposed_seconds + gather)
        busy = work.busy_seconds(part) - work.update_seconds * (1 - 1 / devices)
        return _Step(
            busy + communication.exposed_seconds,
            self._host_seconds(devices, ONE_PROCESS),
            communication,
        )

    def _host_seconds(self, devices: int, way: str) -> float:
        driven = min(devices, self.cluster.devices_per_machine)
        if way == COMPILED:
            return (2 * driven + 1) * GRAPH_LAUNCH_SECONDS
        return self.workload.host_seconds * (driven if way == ONE_PROCESS else 1)
