"""The backend "hierarchical": reduces inside islands of replicas, then between the islands."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

import torch

from mirror.comm.kernels.kernel_arguments import KernelArguments
from mirror.comm.kernels.kernel_communicator import KernelCommunicator, check_partial_sums
from mirror.comm.registry import register
from mirror.comm.topology import Topology, topology_of


@register("hierarchical")
class HierarchicalCommunicator(KernelCommunicator):
    """Reduce-scatter inside islands, all-reduce between them, all-gather (csrc/hierarchical.cu).

    Every element is reduced in replica order inside the islands, and then in island order. So
    results depend on the islands, but not on which tensors are reduced together.

    Inside an island, elements are sent unchanged. Bytes per element that each replica sends to
    other islands in an all-reduce, for the reduction and for the results, with k islands of g
    replicas:

    ==================================  =============================  ============  ============
    elements, ``partial_sums``          k islands of g                 k = 2, g = 2  k = 2, g = 4
    ==================================  =============================  ============  ============
    float32                             (4 (k-1) + 4 (k-1)) / (k g)    2             1
    bfloat16 or float16, "exact"        (4 (k-1) + 2 (k-1)) / (k g)    1.5           0.75
    the same, "rounded"; min and max    (2 (k-1) + 2 (k-1)) / (k g)    1             0.5
    ==================================  =============================  ============  ============

    An island's partial sum takes four bytes in place of g terms of two bytes each.

    Attributes:
        islands: the replicas of each island.
    """

    source = "hierarchical"
    # A slot for the partial sum of each island; see ring_backend.py for the size.
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
        """Allocates the workspaces.

        Args:
            islands: the ids of the replicas in each island, all of equal size; the default
                depends on the devices' links, see ``topology_of``.
            timeout_seconds, max_blocks: as for the other kernels.
            partial_sums: how partial sums of half types are sent, see ``check_partial_sums``.

        Raises:
            ValueError: the islands are not of equal size, or do not have each replica once; or
                ``partial_sums`` is unknown.
            BackendError, DeviceError: as for the other backends.
        """
        self.partial_sums = check_partial_sums(partial_sums)
        super().__init__(devices, timeout_seconds=timeout_seconds, max_blocks=max_blocks)
        if islands is None:
            self.islands = topology_of(self.devices).islands
        else:
            self.islands = Topology(islands).checked(len(self.devices)).islands
        if len(self.islands) == 1:
            self.partial_sums = "exact"  # partial sums are not sent

    @classmethod
    def linked_pairs(cls, num_replicas: int) -> list[tuple[int, int]]:
        # With any islands, some blocks of a replica exchange with each other replica.
        return list(permutations(range(num_replicas), 2))

    def arrange(self, arguments: KernelArguments) -> None:
        order = [replica_id for island in self.islands for replica_id in island]
        arguments.order[: len(order)] = order
        for position, replica_id in enumerate(order):
            arguments.position[replica_id] = position
        arguments.island_size = len(self.islands[0])
