"""The backends "direct", "ring" and "hierarchical": sums by the kernels of csrc/.

    direct         every replica accesses the memory of all other replicas
    ring           replica i sends only to replica i + 1, in a pipeline
    hierarchical   reduces inside islands of replicas, then between the islands

``KernelCommunicator`` runs the kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

import torch

from mirror.comm.kernels.kernel_communicator import KernelCommunicator, check_partial_sums
from mirror.comm.kernels.launcher import PACK_BYTES, KernelArguments
from mirror.comm.registry import register
from mirror.comm.topology import Topology, topology_of

# Up to this size, replicas synchronize once, and each reduces the whole message itself. The limits
# of vLLM and FlashInfer for 8 GPUs with NVLink are near it; mirror has no measurement yet.
ONE_SHOT_MAX_BYTES = 256 * 1024


@register("direct")
class DirectCommunicator(KernelCommunicator):
    """One-shot all-reduce for small messages, two-shot for large ones (csrc/direct.cu).

    Every element is reduced in replica order, so results have the bits of "naive" and do not
    depend on which tensors are reduced together.
    """

    deterministic = True
    source = "direct"
    # Each half has room for a block's part of a one-shot message, and a pack at both ends.
    simulated_scratch_bytes = 2 * (ONE_SHOT_MAX_BYTES // 2 + 1024)
    cuda_scratch_bytes = 2 * (32 * 1024 + 1024)

    @classmethod
    def linked_pairs(cls, num_replicas: int) -> list[tuple[int, int]]:
        return list(permutations(range(num_replicas), 2))

    def share(self, collective: str, num_bytes: int) -> int:
        is_one_shot = collective == "all_reduce" and num_bytes <= ONE_SHOT_MAX_BYTES
        return num_bytes if is_one_shot else super().share(collective, num_bytes)

    def kernel_for(self, collective: str, num_bytes: int, blocks: int) -> str:
        if collective != "all_reduce":
            return super().kernel_for(collective, num_bytes, blocks)
        # A block's part of the packs, of which the first and the last may be incomplete.
        part_bytes = -(-(num_bytes // PACK_BYTES + 2) // blocks) * PACK_BYTES
        fits = num_bytes <= ONE_SHOT_MAX_BYTES and part_bytes <= self.scratch_bytes // 2
        return "direct_one_shot" if fits else "direct_two_shot"


@register("ring")
class RingCommunicator(KernelCommunicator):
    """Reduce-scatter and all-gather around a ring, fused (csrc/ring.cu).

    Chunk ``c`` is reduced in the order ``c + 1, c + 2, ..., c``. So all replicas get the same
    bits, and so does every call with the same tensors. But the chunk of an element, and with it
    the last bit, depends on which tensors are reduced together.

    Bytes per element that each replica sends to its neighbour in an all-reduce, for the reduction
    and for the results:

    ==================================  ===========================  =====  =====  =====
    elements, ``partial_sums``          n replicas                   n = 2  n = 4  n = 8
    ==================================  ===========================  =====  =====  =====
    float32                             (4 (n-1) + 4 (n-1)) / n      4      6      7
    bfloat16 or float16, "exact"        (4 (n-1) - 2 + 2 (n-1)) / n  2      4      5
    the same, "rounded"; min and max    (2 (n-1) + 2 (n-1)) / n      2      3      3.5
    ==================================  ===========================  =====  =====  =====

    The first replica of a sum sends its elements unchanged. From the second replica on, two bytes
    are not enough for a sum that is rounded once, and sending all its terms takes at least four
    bytes as well. If all GPUs can access each other, "direct" sends only two bytes each way.
    """

    source = "ring"
    # Four slots. On GPUs they have 128 KiB: with 32 blocks and three slots in flight some 12 MiB,
    # ten times what a link of 400 GB/s transfers in the 3 us of a round trip. The workspaces of
    # replicas that share the only GPU take 512 KiB for each of its multiprocessors, 66 MiB of an
    # H200; those of one replica per GPU 32 MiB each.
    simulated_scratch_bytes = 4 * 16 * 1024
    cuda_scratch_bytes = 4 * 128 * 1024

    def __init__(
        self,
        devices: Sequence[torch.device | str],
        *,
        timeout_seconds: float | None = None,
        max_blocks: int | None = None,
        partial_sums: str = "exact",
    ) -> None:
        """Allocates the workspaces.

        Args:
            timeout_seconds, max_blocks: as for the other kernels.
            partial_sums: how partial sums of half types are sent, see ``check_partial_sums``.

        Raises:
            ValueError: ``partial_sums`` is unknown.
            BackendError, DeviceError, ValueError: as for the other kernels.
        """
        self.partial_sums = check_partial_sums(partial_sums)
        super().__init__(devices, timeout_seconds=timeout_seconds, max_blocks=max_blocks)

    def share(self, collective: str, num_bytes: int) -> int:
        # A broadcast sends the whole message around the ring.
        return num_bytes if collective == "broadcast" else super().share(collective, num_bytes)

    @classmethod
    def linked_pairs(cls, num_replicas: int) -> list[tuple[int, int]]:
        # Data and flags go forward, credit goes back.
        pairs = [(i, (i + step) % num_replicas) for i in range(num_replicas) for step in (1, -1)]
        return [(i, j) for i, j in pairs if i != j]


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
    # A slot for the partial sum of each island; see RingCommunicator for the size.
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
            self.islands = Topology(islands).validate(len(self.devices)).islands
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
