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
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

COUNTS, IS_THERE = 1.0, 2.0**-10
_MARKS = 16
_MARKED = [[float(i == mark) for i in range(_MARKS)] for mark in range(_MARKS)]
NUM_OTHERS = _MARKS + 5


class Tail(NamedTuple):
    """What a tail says."""

    flags: Sequence[float]
    marks: Sequence[float]
    weight: float
    more: float
    unfit: float
    left: float
    mixed: float

    def is_marked(self, number: int, size: int) -> bool:
        """Whether all workers have given it this mark."""
        return list(self.marks) == [size * mark for mark in _MARKED[number % _MARKS]]


def written(
    flags: Sequence[float],
    number: int,
    weight: float,
    *,
    more: bool = False,
    unfit: bool = False,
    left: bool = False,
    mixed: bool = False,
) -> list[float]:
    """Returns a worker's tail as numbers.

    Args:
        number: of the reduction and the bucket: marked modulo 16.
    """
    return [*flags, *_MARKED[number % _MARKS], weight, more, unfit, left, mixed]


def read(numbers: Sequence[float]) -> Tail:
    """Returns what the numbers of a tail say."""
    num_flags = len(numbers) - NUM_OTHERS
    end = num_flags + _MARKS
    return Tail(numbers[:num_flags], numbers[num_flags:end], *numbers[end:])
