"""Copies of tensors in memory of the host that is kept from one save to the next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mirror.devices import is_simulated, synchronize

_ALIGNMENT = 64


class StagingBuffers:
    """Where a save that does not wait puts what it writes; pinned for tensors of GPUs.

    The memory is kept: to fault its pages in, or to pin it, costs more than the copy.
    """

    def __init__(self) -> None:
        self._layout: list[Any] = []
        self._copies: list[Tensor] = []

    @torch.no_grad()
    def copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns copies, which are there until the next call; waits until they are made."""
        sources = list(tensors.values())
        devices = {tensor.device for tensor in sources}
        is_pinned = not is_simulated(list(devices))
        layout = [is_pinned, *((tensor.shape, tensor.dtype) for tensor in sources)]
        if layout != self._layout:
            self._layout, self._copies = [], []  # before there are others
            self._copies = _allocate(sources, is_pinned=is_pinned)
            self._layout = layout
        if is_pinned:
            for copy, tensor in zip(self._copies, sources, strict=True):
                copy.copy_(tensor, non_blocking=True)
            for device in devices:
                synchronize(device)
        elif sources:
            torch._foreach_copy_(self._copies, sources)
        return dict(zip(tensors, self._copies, strict=True))


def _allocate(tensors: Sequence[Tensor], *, is_pinned: bool) -> list[Tensor]:
    """Returns tensors like these, in one memory."""
    starts, end = [], 0
    for tensor in tensors:
        starts.append(end)
        end += -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT
    memory = torch.empty(end, dtype=torch.uint8, device="cpu", pin_memory=is_pinned)
    made = []
    for start, tensor in zip(starts, tensors, strict=True):
        part = memory[start : start + tensor.numel() * tensor.element_size()]
        made.append(part.view(tensor.dtype).view(tensor.shape))
    return made
