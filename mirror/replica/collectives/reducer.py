"""Reducer: sums lists of tensors over the replicas, in packs, on the wire in a dtype of choice."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mirror.execution.replicas import Replicas


class Reducer:
    """Sums gradients over the replicas.

    Args:
        bytes_per_pack: what a collective takes at once, in bytes.
        wire_dtype: what floating tensors are sent as; ``None``: as they are.
    """

    def __init__(
        self, replicas: Replicas, bytes_per_pack: int, wire_dtype: torch.dtype | None
    ) -> None:
        self._replicas = replicas
        self._wire_dtype = wire_dtype
        self.bytes_per_pack = bytes_per_pack

    def all_reduce(self, lists: Sequence[Sequence[Tensor]], scale: float) -> None:
        """Sums one list of tensors per replica, in place, and multiplies by ``scale``."""
        self._replicas.communicator.all_reduce_checked(
            lists, "sum", scale, self.bytes_per_pack, self._wire_dtype
        )
