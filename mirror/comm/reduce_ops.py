"""Reductions: the operations by name, and sums of tensors in replica order."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from functools import reduce
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from mirror.errors import short_repr
from mirror.values import PerReplica, is_int


class ReduceOp(str, Enum):
    """An operation that combines the values of replicas."""

    SUM = "sum"
    MEAN = "mean"
    AVG = "mean"  # AVG and PRODUCT are torch.distributed's names
    MAX = "max"
    MIN = "min"
    PROD = "prod"
    PRODUCT = "prod"

    def __str__(self) -> str:
        return self.value


Op: TypeAlias = (
    Literal["sum", "mean", "max", "min", "prod", "SUM", "MEAN", "MAX", "MIN", "PROD"] | ReduceOp
)
"""The operations for type checkers; other case and other libraries' members also work."""

PAIRWISE: dict[str, Any] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "prod": torch.mul,
}


def check_axis(axis: object) -> None:
    """Raises TypeError unless an axis is an integer."""
    if not is_int(axis):
        raise TypeError(f"axis must be an integer, got {short_repr(axis)}")


_NAMES = {op.value: op.value for op in ReduceOp}
# Names of members of other libraries' enums.
_MEMBERS = _NAMES | {"avg": "mean", "average": "mean", "product": "prod"}


def reduce_op(op: Any) -> str:
    """Returns the lower-case name of an operation given by name, in any case, or as ReduceOp.

    Members of other libraries' enums are understood by their names: ``torch.distributed``'s
    ``ReduceOp.AVG``, ``tf.distribute.ReduceOp.MEAN``.

    Raises:
        ValueError: the operation is unknown.
    """
    if type(op) is str and op in _NAMES:
        return op
    if isinstance(op, ReduceOp):
        return op.value
    is_name = isinstance(op, str) and not isinstance(op, Enum)
    is_value = isinstance(op, (Tensor, PerReplica))
    name = op if is_name else None if is_value else getattr(op, "name", None)
    if not isinstance(name, str):
        name = None
    found = None if name is None else (_NAMES if is_name else _MEMBERS).get(name.lower())
    if found is None:
        raise ValueError(
            f"unknown reduction {short_repr(op if name is None else name)}; op comes first, and "
            f"is one of {', '.join(_NAMES)}"
        )
    return found


def check_reducible(tensor: Tensor) -> None:
    """Raises TypeError for bool tensors, which have no sum."""
    if tensor.dtype == torch.bool:
        raise TypeError("a bool tensor cannot be reduced; convert it first, to torch.int64 say")


def reduce_tensors(tensors: Sequence[Tensor], device: torch.device, op: str = "sum") -> Tensor:
    """Returns tensors of one shape reduced in order, on ``device``. Differentiable for "sum"."""
    combine = PAIRWISE[op]
    total: Tensor = reduce(combine, [tensor.to(device) for tensor in tensors])
    return total.coalesce() if total.is_sparse else total


def weighted_mean(tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Returns the mean of tensors of one shape and device. Differentiable."""
    total = sum(weights)
    terms = [tensor * (weight / total) for tensor, weight in zip(tensors, weights, strict=True)]
    return reduce_tensors(terms, terms[0].device)
