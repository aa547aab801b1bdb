"""The reference reduction, by torch in replica order; tests compare all others with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mirror.comm.argument_checks import HALF_DTYPES

_COMBINE: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
    "prod": torch.mul,
}


def reduce_in_order(tensors: Sequence[Tensor], op: str, scale: float = 1.0) -> Tensor:
    """Returns ``scale * op(tensors)`` on the first tensor's device, reduced in replica order.

    Half types are accumulated in float32, and rounded once.
    """
    first = tensors[0]
    dtype = torch.float32 if first.dtype in HALF_DTYPES else first.dtype
    total = first.to(dtype)
    for tensor in tensors[1:]:
        total = _COMBINE[op](total, tensor.to(first.device, dtype))
    return (total if scale == 1 else total * scale).to(first.dtype)
