"""Topology: islands of replicas on devices that are near each other, by NVLink or NUMA node."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import torch

from mirror.devices import is_simulated

# CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED of the driver: true for NVLink, not for PCIe.
_NATIVE_ATOMICS = 3

Matrix = tuple[tuple[bool, ...], ...]
"""One row and one column per replica."""


class Topology:
    """Replicas in islands: links inside an island are faster than those between islands.

    Attributes:
        islands: the ids of the replicas in each island, both in ascending order.
    """

    def __init__(self, islands: Sequence[Sequence[int]]) -> None:
        self.islands = tuple(sorted(tuple(sorted(island)) for island in islands))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Topology) and self.islands == other.islands

    def __hash__(self) -> int:
        return hash(self.islands)

    def __repr__(self) -> str:
        return f"Topology({self.islands})"

    def validate(self, num_replicas: int) -> Topology:
        """Returns this topology after a check that it fits.

        Raises:
            ValueError: the islands are not of equal size, or do not have each replica once.
        """
        ids = sorted(replica_id for island in self.islands for replica_id in island)
        if ids != list(range(num_replicas)):
            raise ValueError(
                f"islands must have each of the replicas 0 to {num_replicas - 1} once; got "
                f"{self.islands}; name every replica in one island"
            )
        if not self.is_even():
            raise ValueError(
                f"islands must be of equal size; got {self.islands}; leave them out to have one "
                "island of all replicas where there is no better way"
            )
        return self

    def is_even(self) -> bool:
        """Returns whether all islands have the same number of replicas."""
        return len({len(island) for island in self.islands}) == 1


def topology_of(devices: Sequence[torch.device]) -> Topology:
    """Returns islands of equal size for the devices.

    GPUs that NVLink connects, directly or through other GPUs, form an island. If there is no
    NVLink, the GPUs of one NUMA node form an island. Replicas that share a GPU are in one island.
    If the islands would differ in size, or nothing is known, there is one island.

    Four or more simulated devices, if their number is even, form two islands, so that the CPU runs
    both levels as well.
    """
    n = len(devices)
    if is_simulated(devices):
        half = n // 2 if n >= 4 and n % 2 == 0 else n
        return Topology([range(i, i + half) for i in range(0, n, half)])
    indices = [device.index or 0 for device in devices]
    by_link = group(n, lambda i, j: _are_linked(indices[i], indices[j]))
    by_gpu = group(n, lambda i, j: indices[i] == indices[j])
    if by_link != by_gpu:
        topology = by_link
    else:
        nodes = [_numa_node(index) for index in indices]
        topology = group(n, lambda i, j: nodes[i] is not None and nodes[i] == nodes[j])
        # If the NUMA nodes are unknown, every GPU is an island: nothing is known.
        if topology == by_gpu:
            topology = Topology([range(n)])
    return topology if topology.is_even() else Topology([range(n)])


def group(num_replicas: int, are_near: Callable[[int, int], bool]) -> Topology:
    """Returns the islands: the connected components of the relation ``are_near``."""
    islands: list[list[int]] = []
    for i in range(num_replicas):
        near = [island for island in islands if any(are_near(i, j) for j in island)]
        islands = [island for island in islands if island not in near]
        islands.append([i, *(j for island in near for j in island)])
    return Topology(islands)


def peer_matrix(devices: Sequence[torch.device]) -> Matrix:
    """Returns, for each pair of replicas, whether the first one can access the second's memory."""
    return _matrix(devices, lambda one, other: unreachable_pair([(one, other)]) is None)


def link_matrix(devices: Sequence[torch.device]) -> Matrix:
    """Returns, for each pair of replicas, whether one GPU or NVLink connects them."""
    return _matrix(devices, lambda one, other: _are_linked(one.index or 0, other.index or 0))


def _matrix(
    devices: Sequence[torch.device], holds: Callable[[torch.device, torch.device], bool]
) -> Matrix:
    return tuple(
        tuple(is_simulated((one, other)) or holds(one, other) for other in devices)
        for one in devices
    )


def unreachable_pair(
    pairs: Sequence[tuple[torch.device, torch.device]],
) -> tuple[torch.device, torch.device] | None:
    """Returns the first pair where one GPU cannot access the other's memory, or None."""
    for one, other in pairs:
        if one != other and not torch.cuda.can_device_access_peer(one, other):
            return one, other
    return None


@cache
def _are_linked(one: int, other: int) -> bool:
    """Returns whether two GPUs, by index, are the same or connected by NVLink."""
    if one == other:
        return True
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    value = ctypes.c_int(0)
    status = driver.cuDeviceGetP2PAttribute(ctypes.byref(value), _NATIVE_ATOMICS, one, other)
    return status == 0 and value.value != 0


@cache
def _numa_node(index: int) -> int | None:
    """Returns the NUMA node of a GPU; ``None`` if the system does not report it."""
    properties = torch.cuda.get_device_properties(index)
    # Older versions of torch lack these; no device has the number -1.
    domain, bus, slot = (
        getattr(properties, f"pci_{p}_id", -1) for p in ("domain", "bus", "device")
    )
    path = Path(f"/sys/bus/pci/devices/{domain:04x}:{bus:02x}:{slot:02x}.0/numa_node")
    try:
        node = int(path.read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None
