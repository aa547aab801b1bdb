"""Reductions: the operations by name, in replica order, and ``Reducer``, which sums gradients.

``Reducer`` sums lists of gradients over the replicas: in packs, and sent in a chosen dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from functools import reduce
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from mirror.base.argument_types import is_int
from mirror.comm.host.host_backend import HostCommunicator, missing_reason
from mirror.comm.packing import move_into_flats
from mirror.device.streams import ReplicaStreams
from mirror.errors import short_repr
from mirror.execution.replicas import Replicas
from mirror.values import PerReplica


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

_PAIRWISE: dict[str, Any] = {
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
    combine = _PAIRWISE[op]
    total: Tensor = reduce(combine, [tensor.to(device) for tensor in tensors])
    return total.coalesce() if total.is_sparse else total


def weighted_mean(tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Returns the mean of tensors of one shape and device. Differentiable."""
    total = sum(weights)
    terms = [tensor * (weight / total) for tensor, weight in zip(tensors, weights, strict=True)]
    return reduce_tensors(terms, terms[0].device)


class MovedTensors(NamedTuple):
    """Gradients in the memory where they are reduced, one list per replica.

    Attributes:
        columns: each replica's gradients; those that were packed are views of ``buffers``.
        buffers: each replica's flat buffers.
        staying: the positions of gradients that were not packed.
    """

    columns: Sequence[list[Tensor]]
    buffers: Sequence[Sequence[Tensor]]
    staying: Sequence[int]


class Reducer:
    """Sums gradients over the replicas.

    Args:
        bytes_per_pack: the most bytes that one collective sums.
        wire_dtype: the dtype in which floating tensors are sent; ``None`` for their own.

    Attributes:
        is_on_host: whether the host library sums, or would sum with several replicas.
    """

    def __init__(
        self, replicas: Replicas, bytes_per_pack: int, wire_dtype: torch.dtype | None
    ) -> None:
        self._replicas = replicas
        self.wire_dtype = wire_dtype
        self.bytes_per_pack = bytes_per_pack
        alone = replicas.are_simulated and replicas.num_replicas == 1
        of_host = isinstance(replicas.communicator, HostCommunicator)
        self.is_on_host = (alone or of_host) and missing_reason() is None

    def move(
        self, columns: Sequence[list[Tensor]], streams: ReplicaStreams | None
    ) -> MovedTensors:
        """Moves gradients into flat buffers, if the backend packs; views replace them in place.

        Gradients that are sent in another dtype stay: the conversion packs them anyway.

        Args:
            streams: the streams on which replicas may use the buffers; ``None`` without GPUs.
        """
        if self.wire_dtype is not None or not self._replicas.communicator.packs:
            return MovedTensors(columns, [], range(len(columns[0])))
        before = [] if streams is None else [list(column) for column in columns]
        # The first read may happen in inference mode: such tensors cannot be changed later.
        with torch.inference_mode(False), torch.no_grad():
            moved = MovedTensors(columns, *move_into_flats(columns, self.bytes_per_pack))
        if streams is not None:
            staying = set(moved.staying)
            gone = [[t for i, t in enumerate(mine) if i not in staying] for mine in before]
            streams.keep(gone, moved.buffers)
        return moved

    def all_reduce(self, moved: MovedTensors, scale: float) -> None:
        """Sums the gradients over the replicas, in place, and multiplies by ``scale``."""
        columns, buffers, staying = moved
        lists, bytes_per_pack = columns, self.bytes_per_pack
        if any(buffers):
            lists, bytes_per_pack = [], 0  # the buffers are packs already
            for mine, column in zip(buffers, columns, strict=True):
                lists.append([*mine, *map(column.__getitem__, staying)])
        self._replicas.communicator.all_reduce_checked(
            lists, "sum", scale, bytes_per_pack, self.wire_dtype
        )
