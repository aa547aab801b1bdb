"""The backend "ring": replica i sends to replica i + 1 only, in a pipeline."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mirror.comm.kernels.kernel_communicator import KernelCommunicator, checked_partial_sums
from mirror.comm.registry import register


@register("ring")
class RingCommunicator(KernelCommunicator):
    """Reduce-scatter and all-gather around a ring, fused (csrc/ring.cu).

    Chunk ``c`` is reduced in the order ``c + 1, c + 2, ..., c``. So all replicas hold the same
    bits, and a call has the same result every time, but which element is in which chunk, and with
    it the last bit, depends on what is reduced together.

    Bytes that each replica sends its neighbour in an all-reduce, for each element; the first half
    is that of the reduction, the second one that of the results:

    ==================================  ===========================  =====  =====  =====
    elements, ``partial_sums``          n replicas                   n = 2  n = 4  n = 8
    ==================================  ===========================  =====  =====  =====
    float32                             (4 (n-1) + 4 (n-1)) / n      4      6      7
    bfloat16 or float16, "exact"        (4 (n-1) - 2 + 2 (n-1)) / n  2      4      5
    the same, "rounded"; min and max    (2 (n-1) + 2 (n-1)) / n      2      3      3.5
    ==================================  ===========================  =====  =====  =====

    The first replica of a sum sends its elements as they are. From the second on, two bytes cannot
    say what a sum rounded once needs, and to pass on all that went into it, two bytes a term,
    takes no less than its four. Where all GPUs reach each other, "direct" moves two bytes both
    ways.
    """

    source = "ring"
    # Four slots. On GPUs 128 KiB each: with 32 blocks and three slots in flight some 12 MiB, ten
    # times what a link of 400 GB/s holds in the 3 us of a round trip.
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
        """Makes the workspaces.

        Args:
            timeout_seconds, max_blocks: as for the other kernels.
            partial_sums: what those of half types travel as, see ``checked_partial_sums``.

        Raises:
            ValueError: ``partial_sums`` is unknown.
            BackendError, DeviceError, ValueError: as for the other kernels.
        """
        self.partial_sums = checked_partial_sums(partial_sums)
        super().__init__(devices, timeout_seconds=timeout_seconds, max_blocks=max_blocks)

    def share(self, collective: str, num_bytes: int) -> int:
        # A broadcast goes around the ring as one chunk.
        return num_bytes if collective == "broadcast" else super().share(collective, num_bytes)

    @classmethod
    def linked_pairs(cls, num_replicas: int) -> list[tuple[int, int]]:
        # Data and flags go one way, credit comes back.
        pairs = [(i, (i + step) % num_replicas) for i in range(num_replicas) for step in (1, -1)]
        return [(i, j) for i, j in pairs if i != j]
