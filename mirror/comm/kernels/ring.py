"""The backend "ring": replica i sends to replica i + 1 only, in a pipeline."""

from __future__ import annotations

from mirror.comm.choose import register
from mirror.comm.kernels.kernels import KernelCommunicator


@register("ring")
class RingCommunicator(KernelCommunicator):
    """Reduce-scatter and all-gather around a ring, fused (csrc/ring.cu).

    Chunk ``c`` is reduced in the order ``c + 1, c + 2, ..., c``. So all replicas hold the same
    bits, and a call has the same result every time, but which element is in which chunk, and with
    it the last bit, depends on what is reduced together.
    """

    source = "ring"
    # Four slots. On GPUs 128 KiB each: with 32 blocks and three slots in flight some 12 MiB, ten
    # times what a link of 400 GB/s holds in the 3 us of a round trip.
    simulated_scratch_bytes = 4 * 16 * 1024
    cuda_scratch_bytes = 4 * 128 * 1024

    @classmethod
    def linked_pairs(cls, num_replicas: int) -> list[tuple[int, int]]:
        # Data and flags go one way, credit comes back.
        pairs = [(i, (i + step) % num_replicas) for i in range(num_replicas) for step in (1, -1)]
        return [(i, j) for i, j in pairs if i != j]
