"""Tail: what travels behind the gradients of a bucket, and is summed with them.

flags     one per variable: 1 from a worker with a gradient that counts, 2^-10 from one with a
          gradient that counts nothing; 0 from all means that ``grad`` stays what it was
marks     16, of which that of the reduction and the bucket is 1: a bucket of another
          reduction has another one
weight    the worker's; see [Note: Shares of workers]
more      how many workers have gradients left, of a second pass: all reduce once more
unfit     how many have found a gradient that is not finite
left      how many have failed, and will not be there for the rest
mixed     how many have made several calls of unlike weights since the last reduction
sparse    how many have set sparse gradients aside: all agree on another order, which they are in
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
_MOST_KEPT = 4 * _MARKS  # of batches of other sizes


class Trailer(NamedTuple):
    """What a tail says."""

    flags: Sequence[float]
    marks: Sequence[float]
    weight: float
    more: float
    unfit: float
    left: float
    mixed: float
    sparse: float

    def is_marked(self, number: int, size: int) -> bool:
        """Whether all workers have given it this mark."""
        return list(self.marks) == [size * mark for mark in _MARKED[number % _MARKS]]


class UsualTrailers:
    """Tails of a bucket as nearly all are: every worker has all of it, and nothing else to say.

    Made once per mark, and compared as a whole.

    Args:
        dtype: float32 or float64.
    """

    def __init__(self, num_flags: int, dtype: torch.dtype) -> None:
        self._flags = [COUNTS] * num_flags
        self._code = "f" if dtype == torch.float32 else "d"
        self._own: dict[tuple[int, float], bytes] = {}
        self._all: dict[tuple[int, float, int], list[float]] = {}

    def own(self, number: int, weight: float) -> bytes:
        """Returns this worker's, as bytes of the dtype."""
        key = number % _MARKS, weight
        known = self._own.get(key)
        if known is None:
            if len(self._own) >= _MOST_KEPT:
                self._own.clear()
            known = array(self._code, write_trailer(self._flags, number, weight)).tobytes()
            self._own[key] = known
        return known

    def all(self, number: int, total: float, size: int) -> list[float]:
        """Returns the sum of those of all workers, whose weights have this total."""
        key = number % _MARKS, total, size
        known = self._all.get(key)
        if known is None:
            if len(self._all) >= _MOST_KEPT:
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
    unfit: bool = False,
    left: bool = False,
    mixed: bool = False,
    sparse: bool = False,
) -> list[float]:
    """Returns a worker's tail as numbers.

    Args:
        number: of the reduction and the bucket: marked modulo 16.
    """
    return [*flags, *_MARKED[number % _MARKS], weight, more, unfit, left, mixed, sparse]


def read_trailer(numbers: Sequence[float]) -> Trailer:
    """Returns what the numbers of a tail say."""
    num_flags = len(numbers) - NUM_OTHERS
    end = num_flags + _MARKS
    return Trailer(numbers[:num_flags], numbers[num_flags:end], *numbers[end:])
