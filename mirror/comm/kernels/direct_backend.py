"""The backend "direct": every replica accesses the memory of all other replicas."""

from __future__ import annotations

from itertools import permutations

from mirror.comm.kernels.kernel_arguments import PACK_BYTES
from mirror.comm.kernels.kernel_communicator import KernelCommunicator
from mirror.comm.registry import register

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
