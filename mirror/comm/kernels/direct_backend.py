"""The backend "direct": every replica reads and writes the memory of all the others."""

from __future__ import annotations

from itertools import permutations

from mirror.comm.kernels.kernel_arguments import PACK_BYTES
from mirror.comm.kernels.kernel_communicator import KernelCommunicator
from mirror.comm.registry import register

# Up to here a reduction is one meeting of the replicas, each of which reduces everything itself.
# vLLM's and FlashInfer's limits for 8 GPUs with NVLink lie around it; mirror has no measurement
# of its own yet.
ONE_SHOT_MAX_BYTES = 256 * 1024


@register("direct")
class DirectCommunicator(KernelCommunicator):
    """One-shot all-reduce for small messages, two-shot for large ones (csrc/direct.cu).

    Every element is reduced in replica order, so the result has the bits of "naive", whatever is
    reduced together.
    """

    deterministic = True
    source = "direct"
    # Half of it holds a block's part of a one-shot message, and a pack at either end.
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
        # A block's part of the packs, two of which may be begun only.
        part_bytes = -(-(num_bytes // PACK_BYTES + 2) // blocks) * PACK_BYTES
        fits = num_bytes <= ONE_SHOT_MAX_BYTES and part_bytes <= self.scratch_bytes // 2
        return "direct_one_shot" if fits else "direct_two_shot"
