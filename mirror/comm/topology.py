"""Topology: islands of replicas on devices that are near each other, by NVLink or NUMA node."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path

import torch

from mirror.devices import is_simulated

# CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED of the driver: true for NVLink, not for PCIe.
_NATIVE_ATOMICS = 3

Matrix = tuple[tuple[bool, ...], ...]
"""One row and one column per replica."""


Islands = tuple[tuple[int, ...], ...]
"""The ids of the replicas in each island, both in ascending order.

Links inside an island are faster than those between islands.
"""


def check_islands(islands: Sequence[Sequence[int]], num_replicas: int) -> Islands:
    """Returns islands in ascending order.

    Raises:
        ValueError: the islands are not of equal size, or do not have each replica once.
    """
    found = _sort(islands)
    if sorted(replica_id for island in found for replica_id in island) != [*range(num_replicas)]:
        raise ValueError(
            f"islands must have each of the replicas 0 to {num_replicas - 1} once; got {found}; "
            "name every replica in one island"
        )
    if not _are_even(found):
        raise ValueError(
            f"islands must be of equal size; got {found}; leave them out to have one island of "
            "all replicas where there is no better way"
        )
    return found


def _sort(islands: Iterable[Sequence[int]]) -> Islands:
    return tuple(sorted(tuple(sorted(island)) for island in islands))


def _are_even(islands: Islands) -> bool:
    return len({len(island) for island in islands}) == 1


def islands_of(devices: Sequence[torch.device]) -> Islands:
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
        return tuple(tuple(range(i, i + half)) for i in range(0, n, half))
    indices = [device.index or 0 for device in devices]
    by_link = group(n, lambda i, j: _are_linked(indices[i], indices[j]))
    by_gpu = group(n, lambda i, j: indices[i] == indices[j])
    islands = by_link
    if by_link == by_gpu:
        nodes = [_numa_node(index) for index in indices]
        islands = group(n, lambda i, j: nodes[i] is not None and nodes[i] == nodes[j])
    # If the NUMA nodes are unknown, every GPU is an island: nothing is known.
    return islands if islands != by_gpu and _are_even(islands) else (tuple(range(n)),)


def group(num_replicas: int, are_near: Callable[[int, int], bool]) -> Islands:
    """Returns the islands: the connected components of the relation ``are_near``."""
    islands: list[list[int]] = []
    for i in range(num_replicas):
        near = [island for island in islands if any(are_near(i, j) for j in island)]
        islands = [island for island in islands if island not in near]
        islands.append([i, *(j for island in near for j in island)])
    return _sort(islands)


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
