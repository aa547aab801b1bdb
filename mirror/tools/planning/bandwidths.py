"""Links: what connects the devices of a machine, and machines; with where the numbers are from.

Bandwidths are what NCCL 2.30.7 itself reckons with when it plans its rings, not what is printed
on the box: ``src/graph/topo.h`` has gigabytes per second of one direction of one NVLink, of PCIe 3
x16 and of a network adapter of 100 Gbit/s; ``src/graph/tuning.cc`` has what a hop costs (protocol
"Simple"). A link that is not here is given as two numbers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from mirror.errors import short_repr
from mirror.tools.planning.plan_error import PlanError, not_negative, positive

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
        name: how it is asked for.
        bytes_per_second: what a ring gets of it: per device inside a machine, and of all adapters
            of a machine together between machines.
        hop_seconds: what each hop of a ring or tree costs, whatever its size.
        source: where these numbers are from.
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
    return _measured("link", link)


def link_between_machines(network: str | Sequence[float]) -> Bandwidth:
    """Returns what connects a machine with others.

    Args:
        network: "100g", "8x400g" and the like: adapters of a machine, and Gbit/s of each; or two
            numbers: gigabytes per second of a machine in one direction, and microseconds per hop.

    Raises:
        PlanError: it is none of these.
    """
    if not isinstance(network, str):
        return _measured("network", network)
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


def _measured(name: str, numbers: Sequence[float]) -> Bandwidth:
    if not isinstance(numbers, (tuple, list)) or len(numbers) != 2:
        raise PlanError(
            f"{name} must be a name or (gigabytes per second, microseconds per hop); "
            f"got {short_repr(numbers)}"
        )
    gigabytes = positive(f"{name}: gigabytes per second", numbers[0])
    microseconds = not_negative(f"{name}: microseconds per hop", numbers[1])
    text = f"{gigabytes:g} GB/s, {microseconds:g} us"
    return Bandwidth(text, gigabytes * 1e9, microseconds * 1e-6, "given")
