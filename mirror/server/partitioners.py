"""Partitioners, which cut variables along their first axis, with TensorFlow's numbers of pieces.

A partitioner is a function of a shape and a dtype. It returns the number of pieces along each
axis, which is 1 for all but the first axis, or only the number for the first axis.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from mirror.errors import short_repr

Partitioner = Callable[[Sequence[int], torch.dtype], "Sequence[int] | int"]


@dataclass(frozen=True)
class FixedShards:
    """Cuts each variable into ``num_shards`` pieces, or into its rows if it has fewer.

    Raises:
        ValueError: the number is not positive.
    """

    num_shards: int

    def __post_init__(self) -> None:
        _check_positive("num_shards", self.num_shards)

    def __call__(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> list[int]:
        return _along_rows(shape, self.num_shards)


@dataclass(frozen=True)
class MinSize:
    """Cuts variables into pieces of at least about ``min_shard_bytes``, up to ``max_shards``.

    A variable of ``b`` bytes has ``ceil(b / min_shard_bytes)`` pieces. As in TensorFlow, the last
    ones may be smaller.

    Raises:
        ValueError: a number is not positive.
    """

    min_shard_bytes: int = 256 << 10
    max_shards: int = 1

    def __post_init__(self) -> None:
        _check_positive("min_shard_bytes", self.min_shard_bytes)
        _check_positive("max_shards", self.max_shards)

    def __call__(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> list[int]:
        num_bytes = math.prod(shape) * dtype.itemsize
        return _along_rows(shape, min(self.max_shards, -(-num_bytes // self.min_shard_bytes)))


@dataclass(frozen=True)
class MaxSize:
    """Cuts variables into pieces of at most ``max_shard_bytes``, or of one row if that is larger.

    Raises:
        ValueError: a number is not positive.
    """

    max_shard_bytes: int
    max_shards: int | None = None

    def __post_init__(self) -> None:
        _check_positive("max_shard_bytes", self.max_shard_bytes)
        if self.max_shards is not None:
            _check_positive("max_shards", self.max_shards)

    def __call__(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> list[int]:
        row_bytes = math.prod(shape[1:]) * dtype.itemsize
        rows_per_shard = max(1, self.max_shard_bytes // max(1, row_bytes))
        shards = -(-shape[0] // rows_per_shard) if shape else 1
        return _along_rows(
            shape, shards if self.max_shards is None else min(shards, self.max_shards)
        )


def num_pieces(
    partitioner: Partitioner | None, name: str, shape: Sequence[int], dtype: torch.dtype
) -> int:
    """Returns the number of pieces of a variable, which is 1 for scalars.

    Raises:
        ValueError: the partitioner cuts along another axis, or returns invalid numbers.
    """
    if partitioner is None or not shape:
        return 1
    result = partitioner(torch.Size(shape), dtype)
    counts = [result, *[1] * (len(shape) - 1)] if isinstance(result, int) else result
    if not isinstance(counts, Sequence) or not all(_is_int(n) and int(n) >= 1 for n in counts):
        raise ValueError(
            f"a partitioner returns the number of pieces along every axis, integers from 1 on; "
            f"for {name} of shape {tuple(shape)} it has returned {short_repr(result)}"
        )
    if len(counts) != len(shape) or any(n != 1 for n in counts[1:]):
        raise ValueError(
            f"variables are cut along their first axis only, so a partitioner returns "
            f"[n{', 1' * (len(shape) - 1)}] for {name} of shape {tuple(shape)}; it has returned "
            f"{list(counts)}"
        )
    return max(1, min(counts[0], shape[0]))


def _along_rows(shape: Sequence[int], shards: int) -> list[int]:
    if not shape:
        return []
    return [max(1, min(shards, shape[0])), *[1] * (len(shape) - 1)]


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_positive(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be an integer from 1 on, got {short_repr(value)}")
