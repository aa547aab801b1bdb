"""The backend "ring": replica i sends only to replica i + 1, in a pipeline."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mirror.comm.kernels.kernel_communicator import KernelCommunicator, check_partial_sums
from mirror.comm.registry import register


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
    # ten times what a link of 400 GB/s transfers in the 3 us of a round trip.
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
