"""What an all-reduce costs, by closed forms in latency and bandwidth.

S bytes on each of n devices, on k machines of g devices. B and a: bandwidth and latency of a hop
inside a machine, C and b: those of a machine's network; c: what every collective costs.

    ring          c + 2 (n - k) a + 2 (k - 1) b + 2 (n - 1) / n S / min(B, C)
    tree          c + 2 (g - 1) a + 2 ceil(log2 k) b + 2 S / (0.92 min(B, C))
    hierarchical  2 c + 2 (g - 1) a + c' + 2 (k - 1) b + 2 (g - 1) / g S / B + 2 (k - 1) / k S / C

Ring: Patarasuk and Yuan (2009); it passes every machine once, so 2 (k - 1) of its hops are between
machines. Tree: NCCL's double binary tree, a chain inside a machine; 0.92 is its own discount. Both
are as ``ncclTopoTuneModel`` in NCCL's ``src/graph/tuning.cc`` has them, and "auto" takes the
quicker one, as NCCL does. Hierarchical: reduce-scatter inside, all-reduce of the shards between
machines, all-gather inside; c' = c if there are other machines. It is not NCCL's, and so it is
never "auto"'s.
"""

from __future__ import annotations

from dataclasses import dataclass

from mirror.tools.planning.bandwidths import Bandwidth

ALGORITHMS = ("auto", "ring", "tree", "hierarchical")

COLLECTIVE_SECONDS = 8.4e-6
"""What each collective costs: baseLatencies, ring and tree, Simple, in NCCL's tuning.cc."""

_SHARE_OF_TREE = 0.92  # of the bandwidth, for all-reduces: tuning.cc


@dataclass(frozen=True)
class Cluster:
    """Machines of equal devices.

    Attributes:
        link: between the devices of a machine.
        network: between machines.
        devices_per_machine: how many share a machine.
        algorithm: one of ``ALGORITHMS``.
    """

    link: Bandwidth
    network: Bandwidth
    devices_per_machine: int
    algorithm: str = "auto"

    def num_machines(self, num_devices: int) -> int:
        """Returns how many machines so many devices take."""
        return -(-num_devices // self.devices_per_machine)

    def all_reduce_seconds(self, num_bytes: float, num_devices: int) -> float:
        """Returns how long an all-reduce of so many bytes per device takes; 0 for one device."""
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
        """The bandwidth of the slowest link on the way around all devices."""
        links = [self.network] if self.num_machines(n) > 1 else []
        if min(n, self.devices_per_machine) > 1:
            links.append(self.link)
        return min(link.bytes_per_second for link in links)
