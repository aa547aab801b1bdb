"""Copies of tensors in memory of the host that is kept from one save to the next."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from mirror.devices import is_simulated, synchronize

_ALIGNMENT = 64


class HostCopies:
    """Where a save that does not wait puts what it writes; pinned for tensors of GPUs.

    The memory is kept: to fault its pages in, or to pin it, costs more than the copy.
    """

    def __init__(self) -> None:
        self._memory: Tensor | None = None

    @torch.no_grad()
    def copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns copies, which are there until the next call; waits until they are made."""
        devices = {tensor.device for tensor in tensors.values()}
        starts, end = [], 0
        for tensor in tensors.values():
            starts.append(end)
            end += -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT
        memory = self._of(end, is_pinned=not is_simulated(list(devices)))
        copies: list[Tensor] = []
        for start, tensor in zip(starts, tensors.values(), strict=True):
            part = memory[start : start + tensor.numel() * tensor.element_size()]
            copies.append(part.view(tensor.dtype).view(tensor.shape))
        for copy, tensor in zip(copies, tensors.values(), strict=True):
            copy.copy_(tensor, non_blocking=True)
        for device in devices:
            synchronize(device)
        return dict(zip(tensors, copies, strict=True))

    def _of(self, num_bytes: int, *, is_pinned: bool) -> Tensor:
        memory = self._memory
        if memory is None or len(memory) < num_bytes or memory.is_pinned() != is_pinned:
            self._memory = None  # before there is another one
            memory = torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=is_pinned)
            self._memory = memory
        return memory
