"""Reduction operations by name, and ordered reductions with torch operations."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from functools import reduce
from typing import Any

import torch
from torch import Tensor


class ReduceOp(str, Enum):
    """How values of replicas combine."""

    SUM = "sum"
    MEAN = "mean"
    MAX = "max"
    MIN = "min"
    PROD = "prod"

    def __str__(self) -> str:
        return self.value


_PAIRWISE: dict[str, Any] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "prod": torch.mul,
}


def reduce_op(op: Any) -> str:
    """Returns the lower-case name of an operation given by name, in any case, or as ReduceOp.

    Raises:
        ValueError: unknown operation.
    """
    name = op.value if isinstance(op, ReduceOp) else op.lower() if isinstance(op, str) else op
    names = [known.value for known in ReduceOp]
    if name not in names:
        raise ValueError(f"unknown reduction {op!r}; use one of {', '.join(names)}")
    return str(name)


def check_reducible(tensor: Tensor) -> None:
    """Raises TypeError for bool tensors, which have no sum."""
    if tensor.dtype == torch.bool:
        raise TypeError("a bool tensor cannot be reduced; convert it first, to torch.int64 say")


def summed(tensors: Sequence[Tensor], device: torch.device, op: str = "sum") -> Tensor:
    """Reduces tensors of one shape in the given order, on ``device``. Differentiable for sum."""
    combine = _PAIRWISE[op]
    total: Tensor = reduce(combine, [tensor.to(device) for tensor in tensors])
    return total.coalesce() if total.is_sparse else total
