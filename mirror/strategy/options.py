"""CommunicationOptions: how a strategy's replicas communicate."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class CommunicationOptions:
    """Options of a strategy's collectives.

    Attributes:
        bytes_per_pack: gradients are packed into buffers of at most this many bytes where the
            backend wants packs; 0 reduces tensor by tensor.
        timeout_seconds: how long no replica may move before ``CollectiveTimeoutError``;
            ``None`` waits for ever.
        wire_dtype: floating dtype in which gradients travel; ``None`` for their own.
        deterministic: only a backend whose sums do not depend on packing or algorithm.

    Raises:
        ValueError: a negative pack or timeout, or a dtype that is not a floating one.
    """

    bytes_per_pack: int = 25 * 2**20
    timeout_seconds: float | None = None
    wire_dtype: torch.dtype | None = None
    deterministic: bool = False

    def __post_init__(self) -> None:
        if self.bytes_per_pack < 0:
            raise ValueError(f"bytes_per_pack must be >= 0, got {self.bytes_per_pack}")
        if self.timeout_seconds is not None and not self.timeout_seconds >= 0:
            raise ValueError(f"timeout_seconds must be >= 0 or None, got {self.timeout_seconds}")
        wire = self.wire_dtype
        if wire is not None and not (isinstance(wire, torch.dtype) and wire.is_floating_point):
            raise ValueError(f"wire_dtype must be a floating torch.dtype or None, got {wire!r}")
