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

The time of an all-reduce, see ``Cluster``, is that of closed forms for ring and tree over the
bandwidths of links.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial

from mirror.errors import short_repr
from mirror.tools.planning.workload import PlanError, Workload, check_not_negative, check_number

_TOPOLOGY = "NVIDIA/nccl 2.30.7 (2026), src/graph/topo.h"
_COUNTS = "links per GPU: stas00/ml-engineering (2026), network/README.md"
_NVLINK_HOP = 3.4e-6  # these three: NVIDIA/nccl 2.30.7, src/graph/tuning.cc, ring, Simple
_PCIE_HOP = 5.7e-6
_NETWORK_HOP = 14.0e-6
_BYTES_PER_GIGABIT = 0.12e9  # 12.0 GB/s for 100 Gbit/s: topo.h


@dataclass(frozen=True)
class Bandwidth:
    """A link, in one direction.

    Attributes:
        name: its name among the arguments of ``plan``.
        bytes_per_second: the bandwidth for a ring: of one device inside a machine, of all
            adapters of a machine together between machines.
        hop_seconds: the latency of each hop of a ring or tree.
        source: the source of these numbers.
    """

    name: str
    bytes_per_second: float
    hop_seconds: float
    source: str


def _nvlink(generation: int, num_links: int, gigabytes: float, constant: str) -> Bandwidth:
    return Bandwidth(
        f"nvlink{generation}",
        num_links * gigabytes * 1e9,
        _NVLINK_HOP,
        f"{num_links} x {gigabytes} GB/s, {constant}: {_TOPOLOGY}; {_COUNTS}",
    )


def _pcie(generation: int) -> Bandwidth:
    times = 2 ** (generation - 3)
    twice = "" if times == 1 else f" x {times}: each generation doubles the rate"
    return Bandwidth(
        f"pcie{generation}", times * 12e9, _PCIE_HOP, f"12.0 GB/s, PCI_BW{twice}: {_TOPOLOGY}"
    )


# Bandwidths are those that NCCL 2.30.7 plans its rings with, not nominal ones: src/graph/topo.h
# has gigabytes per second of one direction of one NVLink, of PCIe 3 x16, and of a network adapter
# of 100 Gbit/s; src/graph/tuning.cc has the cost of a hop (protocol "Simple").
LINKS = {
    link.name: link
    for link in (
        _nvlink(1, 4, 18.0, "SM60_NVLINK_BW (P100)"),
        _nvlink(2, 6, 20.0, "SM70_NVLINK_BW (V100)"),
        _nvlink(3, 12, 20.0, "SM80_NVLINK_BW (A100)"),
        _nvlink(4, 18, 20.6, "SM90_NVLINK_BW (H100, H200)"),
        _nvlink(5, 18, 40.1, "SM100_NVLINK_BW (B200)"),
        _pcie(3),
        _pcie(4),
        _pcie(5),
    )
}
"""Between the devices of one machine, by name."""

NETWORKS = {
    "25g": "one adapter of 25 Gbit/s: Ethernet, RoCE",
    "100g": "one adapter of 100 Gbit/s: InfiniBand EDR",
    "4x100g": "AWS EFA v1",
    "8x200g": "eight InfiniBand HDR",
    "8x400g": "eight InfiniBand NDR (Quantum-2), AWS EFA v2",
}
"""Between machines: examples. ``KxGg`` is K adapters of G Gbit/s a machine, for any K and G."""


def link_between_devices(link: str | Sequence[float]) -> Bandwidth:
    """Returns a link inside a machine.

    Args:
        link: a name of ``LINKS``, or two numbers: gigabytes per second of a device in one
            direction, and microseconds per hop.

    Raises:
        PlanError: there is no such link.
    """
    if isinstance(link, str):
        if link in LINKS:
            return LINKS[link]
        raise PlanError(
            f"link must be one of {', '.join(LINKS)}, or (gigabytes per second, microseconds per "
            f"hop); got {short_repr(link)}"
        )
    return _parse_bandwidth("link", link)


def link_between_machines(network: str | Sequence[float]) -> Bandwidth:
    """Returns the network between machines.

    Args:
        network: "100g", "8x400g" and the like: adapters of a machine, and Gbit/s of each; or two
            numbers: gigabytes per second of a machine in one direction, and microseconds per hop.

    Raises:
        PlanError: the network has neither form.
    """
    if not isinstance(network, str):
        return _parse_bandwidth("network", network)
    match = re.fullmatch(r"(?:([1-9]\d*)x)?([1-9]\d*)g", network, re.ASCII)
    if match is None:
        raise PlanError(
            "network must be like '100g' or '8x400g' (adapters of a machine x Gbit/s), or "
            f"(gigabytes per second, microseconds per hop); got {short_repr(network)}"
        )
    gigabits = int(match[1] or 1) * int(match[2])
    return Bandwidth(
        network,
        gigabits * _BYTES_PER_GIGABIT,
        _NETWORK_HOP,
        f"12.0 GB/s for 100 Gbit/s, NET_BW: {_TOPOLOGY}",
    )


def _parse_bandwidth(name: str, numbers: Sequence[float]) -> Bandwidth:
    if not isinstance(numbers, (tuple, list)) or len(numbers) != 2:
        raise PlanError(
            f"{name} must be a name or (gigabytes per second, microseconds per hop); "
            f"got {short_repr(numbers)}"
        )
    gigabytes = check_number(f"{name}: gigabytes per second", numbers[0])
    microseconds = check_not_negative(f"{name}: microseconds per hop", numbers[1])
    text = f"{gigabytes:g} GB/s, {microseconds:g} us"
    return Bandwidth(text, gigabytes * 1e9, microseconds * 1e-6, "given")


ALGORITHMS = ("auto", "ring", "tree", "hierarchical")

COLLECTIVE_SECONDS = 8.4e-6
"""The fixed cost of a collective: baseLatencies, ring and tree, Simple, in NCCL's tuning.cc."""

_SHARE_OF_TREE = 0.92  # of the bandwidth, for all-reduces: tuning.cc


@dataclass(frozen=True)
class Cluster:
    """Machines of equal devices, and the time of an all-reduce between them.

    S bytes on each of n devices, on k machines of g devices. B and a are bandwidth and latency of
    a hop inside a machine, C and b those of the network between machines; c is the fixed cost of a
    collective.

        ring          c + 2 (n - k) a + 2 (k - 1) b + 2 (n - 1) / n S / min(B, C)
        tree          c + 2 (g - 1) a + 2 ceil(log2 k) b + 2 S / (0.92 min(B, C))
        hierarchical  2 c + 2 (g - 1) a + 2 (g - 1) / g S / B
                      + c' + 2 (k - 1) b + 2 (k - 1) / k S / C

    Ring: Patarasuk and Yuan (2009); it passes every machine once, so 2 (k - 1) of its hops are
    between machines. Tree: the double binary tree of NCCL, a chain inside a machine; 0.92 is its
    own discount. Both are as in ``ncclTopoTuneModel`` in ``src/graph/tuning.cc`` of NCCL; "auto"
    takes the faster one, as NCCL does. Hierarchical: reduce-scatter inside, all-reduce of the
    shards between machines, all-gather inside; c' = c if there are other machines. NCCL does not
    have it, so "auto" never takes it.

    Attributes:
        link: the link between the devices of a machine.
        network: the link between machines.
        devices_per_machine: the number of devices of a machine.
        algorithm: one of ``ALGORITHMS``.
    """

    link: Bandwidth
    network: Bandwidth
    devices_per_machine: int
    algorithm: str = "auto"

    def num_machines(self, num_devices: int) -> int:
        """Returns the number of machines for a number of devices."""
        return -(-num_devices // self.devices_per_machine)

    def all_reduce_seconds(self, num_bytes: float, num_devices: int) -> float:
        """Returns the time of an all-reduce of ``num_bytes`` per device; 0 for one device."""
        if num_devices == 1:
            return 0.0
        ways = {"ring": self._ring, "tree": self._tree, "hierarchical": self._hierarchical}
        if self.algorithm == "auto":
            return min(ways[name](num_bytes, num_devices) for name in ("ring", "tree"))
        return ways[self.algorithm](num_bytes, num_devices)

    def _ring(self, num_bytes: float, n: int) -> float:
        k = self.num_machines(n)
        hops = 2 * (n - k) * self.link.hop_seconds + 2 * (k - 1) * self.network.hop_seconds
        return COLLECTIVE_SECONDS + hops + 2 * (n - 1) / n * num_bytes / self._slowest(n)

    def _tree(self, num_bytes: float, n: int) -> float:
        k, g = self.num_machines(n), min(n, self.devices_per_machine)
        levels = (k - 1).bit_length()
        hops = 2 * (g - 1) * self.link.hop_seconds + 2 * levels * self.network.hop_seconds
        return COLLECTIVE_SECONDS + hops + 2 * num_bytes / (_SHARE_OF_TREE * self._slowest(n))

    def _hierarchical(self, num_bytes: float, n: int) -> float:
        k, g = self.num_machines(n), min(n, self.devices_per_machine)
        seconds = 0.0
        if g > 1:
            inside = 2 * (g - 1) / g * num_bytes / self.link.bytes_per_second
            seconds += 2 * COLLECTIVE_SECONDS + 2 * (g - 1) * self.link.hop_seconds + inside
        if k > 1:
            between = 2 * (k - 1) / k * num_bytes / self.network.bytes_per_second
            seconds += COLLECTIVE_SECONDS + 2 * (k - 1) * self.network.hop_seconds + between
        return seconds

    def _slowest(self, n: int) -> float:
        """Returns the bandwidth of the slowest link of a ring through all devices."""
        links = [self.network] if self.num_machines(n) > 1 else []
        if min(n, self.devices_per_machine) > 1:
            links.append(self.link)
        return min(link.bytes_per_second for link in links)


def table_of_links() -> str:
    """Returns the named links, with the sources of their numbers."""
    rows = [("link", "GB/s", "us a hop", "source")]
    for link in (*LINKS.values(), *map(link_between_machines, NETWORKS)):
        speed = f"{link.bytes_per_second / 1e9:g}"
        rows.append((link.name, speed, f"{1e6 * link.hop_seconds:g}", link.source))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:3]
    lines = [
        f"{name:{widths[0]}}  {speed:>{widths[1]}}  {hop:>{widths[2]}}  {source}"
        for name, speed, hop, source in rows
    ]
    return "\n".join([*lines, "", *(f"{name:{widths[0]}}  {NETWORKS[name]}" for name in NETWORKS)])


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
