"""The values that replicas keep apart in mirrored buffers, taken and put back.

What is read outside ``run`` is their combination, see [Note: Combined buffers]; a run that goes on
with that on every replica differs in rounding from one that was never stopped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mirror.replica.params.mirrored_buffer import MirroredBuffer, ReplicatedBuffer


def local_buffers(module: nn.Module) -> dict[str, tuple[list[int], list[Tensor]]]:
    """Returns which replicas have run last, and all replicas' copies, of buffers that differ.

    Tensors are the copies themselves, in replica order.
    """
    return {
        name: (list(ran), copies)
        for name, buffer in _mirrored(module).items()
        if (found := buffer.local_values()) is not None
        for ran, copies in (found,)
    }


def set_local_buffers(
    module: nn.Module, found: Mapping[str, tuple[Any, Sequence[Tensor]]]
) -> None:
    """Gives the replicas what ``local_buffers`` returned, after the combined values were loaded.

    Nothing happens to buffers of another number of replicas, or shape.
    """
    for name, buffer in _mirrored(module).items():
        if name in found:
            ran, copies = found[name]
            if _fit(buffer, ran, copies):
                with torch.no_grad():
                    buffer.set_local_values(tuple(ran), copies)


def _mirrored(module: nn.Module) -> dict[str, ReplicatedBuffer]:
    return {
        name: buffer._mirrored
        for name, buffer in module.named_buffers()
        if isinstance(buffer, MirroredBuffer)
    }


def _fit(buffer: ReplicatedBuffer, ran: Any, copies: Sequence[Tensor]) -> bool:
    own = [(copy.shape, copy.dtype) for copy in buffer.copies]
    replicas = range(len(own))
    return own == [(copy.shape, copy.dtype) for copy in copies] and all(r in replicas for r in ran)
