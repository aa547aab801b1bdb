"""The backend "hierarchical": reduces inside islands of replicas, then between the islands."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

import torch

from mirror.comm.kernels.kernel_arguments import KernelArguments
from mirror.comm.kernels.kernel_communicator import KernelCommunicator, checked_partial_sums
from mirror.comm.registry import register
from mirror.comm.topology import Topology, topology_of


@register("hierarchical")
class HierarchicalCommunicator(KernelCommunicator):
    """Reduce-scatter inside islands, all-reduce between them, all-gather (csrc/hierarchical.cu).

    Every element is reduced in replica order inside the islands, and then in island order. So the
    result depends on the islands, but not on what is reduced together.

    Inside an island elements move as they are. Bytes that each replica sends to other islands in
    an all-reduce, for each element, with k islands of g members; the first half is that of the
    reduction, the second one that of the results:

    ==================================  =============================  ============  ============
    elements, ``partial_sums``          k islands of g                 k = 2, g = 2  k = 2, g = 4
    ==================================  =============================  ============  ============
    float32                             (4 (k-1) + 4 (k-1)) / (k g)    2             1
    bfloat16 or float16, "exact"        (4 (k-1) + 2 (k-1)) / (k g)    1.5           0.75
    the same, "rounded"; min and max    (2 (k-1) + 2 (k-1)) / (k g)    1             0.5
    ==================================  =============================  ============  ============

    An island's partial sum is four bytes for g terms of two: the terms themselves would be as many
    or more.

    Attributes:
        islands: the replicas of each island.
    """

    source = "hierarchical"
    # A slot for a partial sum from each island; see ring.py for what is in flight.
    simulated_scratch_bytes = 64 * 1024
    cuda_scratch_bytes = 512 * 1024

    def __init__(
        self,
        devices: Sequence[torch.device | str],
        *,
        islands: Sequence[Sequence[int]] | None = None,
        timeout_seconds: float | None = None,
        max_blocks: int | None = None,
        partial_sums: str = "exact",
    ) -> None:
        """Makes the workspaces.

        Args:
            islands: the ids of the replicas in each island, all of equal size; by default what
                the devices' links suggest, see ``topology_of``.
            timeout_seconds, max_blocks: as for the other kernels.
            partial_sums: what those of half types travel as, see ``checked_partial_sums``.

        Raises:
            ValueError: the islands are not of equal size, or do not have each replica once; or
                ``partial_sums`` is unknown.
            BackendError, DeviceError: as for the other backends.
        """
        self.partial_sums = checked_partial_sums(partial_sums)
        super().__init__(devices, timeout_seconds=timeout_seconds, max_blocks=max_blocks)
        if islands is None:
            self.islands = topology_of(self.devices).islands
        else:
            self.islands = Topology(islands).checked(len(self.devices)).islands
        if len(self.islands) == 1:
            self.partial_sums = "exact"  # none of them leaves its replica

    @classmethod
    def linked_pairs(cls, num_replicas: int) -> list[tuple[int, int]]:
        # Whatever the islands: a replica talks to some of all the others.
        return list(permutations(range(num_replicas), 2))

    def arrange(self, arguments: KernelArguments) -> None:
        order = [replica_id for island in self.islands for replica_id in island]
        arguments.order[: len(order)] = order
        for position, replica_id in enumerate(order):
            arguments.position[replica_id] = position
        arguments.island_size = len(self.islands[0])
