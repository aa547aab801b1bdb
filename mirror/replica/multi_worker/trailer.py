"""Trailer: numbers that travel after a bucket's gradients, and are summed with them.

Each worker writes its own; after the sum every worker reads the same trailer:

flags        one per variable. A worker writes 1 for a gradient that counts, 2^-10 for a gradient
             of weight 0, and 0 for none. If all write 0, ``grad`` is unchanged.
marks        16 numbers, all 0 but one, which depends on the reduction and the bucket: so a worker
             that sums a bucket of another reduction is detected
weight       the worker's weight; see [Note: Shares of workers]
more         1 from a worker that has gradients of a second pass: all workers reduce once more
non_finite   1 from a worker that has found a gradient that is not finite
failed       1 from a worker that has failed, and will not take part in the rest
mixed        1 from a worker whose calls since the last reduction had different weights
sparse       1 from a worker that has set sparse gradients aside: all agree on an order without
             their variables
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import torch

COUNTS, IS_THERE = 1.0, 2.0**-10
_MARKS = 16
_MARKED = [[float(i == mark) for i in range(_MARKS)] for mark in range(_MARKS)]
_NUM_AFTER_MARKS = 6
NUM_OTHERS = _MARKS + _NUM_AFTER_MARKS
_MAX_CACHED = 4 * _MARKS  # more than one per mark, as batches may have several sizes


class Trailer(NamedTuple):
    """A trailer, summed over all workers."""

    flags: Sequence[float]
    marks: Sequence[float]
    weight: float
    more: float
    non_finite: float
    failed: float
    mixed: float
    sparse: float

    def is_marked(self, number: int, size: int) -> bool:
        """Whether all workers have written the mark of this number."""
        return list(self.marks) == [size * mark for mark in _MARKED[number % _MARKS]]


class UsualTrailers:
    """The trailers of the usual case: every worker has all gradients, and no flag is set.

    They are cached per mark, and compared as a whole.

    Args:
        dtype: float32 or float64.
    """

    def __init__(self, num_flags: int, dtype: torch.dtype) -> None:
        self._flags = [COUNTS] * num_flags
        self._code = "f" if dtype == torch.float32 else "d"
        self._own: dict[tuple[int, float], bytes] = {}
        self._all: dict[tuple[int, float, int], list[float]] = {}

    def own(self, number: int, weight: float) -> bytes:
        """Returns this worker's trailer, as bytes of the dtype."""
        key = number % _MARKS, weight
        known = self._own.get(key)
        if known is None:
            if len(self._own) >= _MAX_CACHED:
                self._own.clear()
            known = array(self._code, write_trailer(self._flags, number, weight)).tobytes()
            self._own[key] = known
        return known

    def all(self, number: int, total: float, size: int) -> list[float]:
        """Returns the sum of all workers' trailers.

        Args:
            total: the sum of their weights.
            size: the number of workers.
        """
        key = number % _MARKS, total, size
        known = self._all.get(key)
        if known is None:
            if len(self._all) >= _MAX_CACHED:
                self._all.clear()
            known = [size * one for one in write_trailer(self._flags, number, 0.0)]
            known[-_NUM_AFTER_MARKS] = total
            self._all[key] = known
        return known


def write_trailer(
    flags: Sequence[float],
    number: int,
    weight: float,
    *,
    more: bool = False,
    non_finite: bool = False,
    failed: bool = False,
    mixed: bool = False,
    sparse: bool = False,
) -> list[float]:
    """Returns a worker's trailer as numbers.

    Args:
        number: the number of the reduction and the bucket, which is marked modulo 16.
    """
    return [*flags, *_MARKED[number % _MARKS], weight, more, non_finite, failed, mixed, sparse]


def read_trailer(numbers: Sequence[float]) -> Trailer:
    """Returns the trailer that the numbers encode."""
    num_flags = len(numbers) - NUM_OTHERS
    end = num_flags + _MARKS
    return Trailer(numbers[:num_flags], numbers[num_flags:end], *numbers[end:])
