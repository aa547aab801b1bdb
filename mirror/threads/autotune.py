"""Contest: which of several manners is the fastest, by the clock, while steps are taken so."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Generic, Protocol, TypeVar

_logger = logging.getLogger("mirror")

WARM = 2  # steps before the first one that counts: they make state, threads, pools
LOOKS = 4  # steps that count in each manner
HELD = 1000  # steps until it is decided anew
UNLIKE = 4  # steps in a row of another size, after which it is decided anew
WINDOW = 16  # steps, of which the fastest is compared with what other manners took
MOST_TRIED = 16  # steps in one manner while it is decided
WORTH = 0.97  # of one manner's time, for another one to be worth a change


class HasName(Protocol):
    """A manner, as messages call it."""

    @property
    def name(self) -> str:
        """What replicas do, "take turns"."""


M = TypeVar("M", bound=HasName)


class Autotuner(Generic[M]):
    """The steps of a program, taken in one manner after the other, then in the fastest.

    ::

        step      1 2 | 3 4 5 6 | 7 8 9 10 | 11 ... 1010 | 1011 ...
        manner    1st |   1st   |   2nd    | the fastest |  1st ...

    The fastest step of each counts, not the median: on a shared machine most of what makes steps
    unlike is others' work. Steps of one size alone are compared, and it is not begun but after two
    of them. It is decided anew after 1000 steps; after four in a row of a size that is more than
    twice, or less than half, of what it was decided for; and where the fastest of 16 has taken
    longer than another manner's did: the machine has more to do now, or less.

    Args:
        candidates: the manners, those first that are taken unless another one is faster; asked
            whenever it is to be decided.
        clock: in seconds.

    Attributes:
        now: the manner of the coming step.
    """

    def __init__(
        self, candidates: Callable[[], Sequence[M]], clock: Callable[[], float] = perf_counter
    ) -> None:
        self._ask, self._clock = candidates, clock
        self._manners = tuple(candidates())
        self.now = self._manners[0]
        self._size = self._last_size = 0.0  # of what it was decided for; of the last step
        self._trying: int | None = None  # the place of the manner that is tried
        self._left, self._unlike = WARM, 0
        self._seconds: list[list[float]] = []
        self._recent: list[float] = []  # of the manner that is held
        self._rival = math.inf  # what the fastest of the others took
        self._last = clock()

    def step_ended(self, size: float) -> None:
        """Notes that a step has ended.

        Args:
            size: how many examples it had; 0 where that is unknown.
        """
        now = self._clock()
        seconds, self._last = now - self._last, now
        is_steady, self._last_size = size == self._last_size, size
        self._left -= 1
        if self._trying is None:
            is_unlike = not self._size / 2 <= size <= self._size * 2
            self._unlike = self._unlike + 1 if is_unlike else 0
            is_other = self._unlike >= UNLIKE and bool(self._seconds)
            if size == self._size:
                self._recent.append(seconds)
            if is_steady and (self._left <= 0 or is_other or self._is_beaten()):
                self._begin(size)
            return
        if size == self._size:
            self._seconds[self._trying].append(seconds)
        if len(self._seconds[self._trying]) >= LOOKS or self._left <= 0:
            self._try_next()

    def _is_beaten(self) -> bool:
        if len(self._recent) < WINDOW:
            return False
        least = min(self._recent)
        self._recent.clear()
        return least * WORTH > self._rival

    def _begin(self, size: float) -> None:
        self._manners, self._size = tuple(self._ask()), size
        self._seconds, self._unlike = [[] for _ in self._manners], 0
        if len(self._manners) == 1:
            self._hold(0)
        else:
            self._trying, self._left, self.now = 0, MOST_TRIED, self._manners[0]

    def _try_next(self) -> None:
        assert self._trying is not None
        self._trying += 1
        if self._trying < len(self._manners):
            self._left, self.now = MOST_TRIED, self._manners[self._trying]
            return
        fastest = [min(seconds, default=math.inf) for seconds in self._seconds]
        chosen = next(i for i, least in enumerate(fastest) if least * WORTH <= min(fastest))
        self._hold(chosen)
        self._rival = min(least for i, least in enumerate(fastest) if i != chosen)
        told = ", ".join(
            f"{least * 1e3:.3g} ms where they {manner.name}"
            for manner, least in zip(self._manners, fastest, strict=True)
        )
        _logger.info(
            "schedule: the replicas %s from now on; the fastest of %d steps of %g examples took "
            "%s; to be measured again after %d steps",
            self.now.name,
            LOOKS,
            self._size,
            told,
            HELD,
        )

    def _hold(self, chosen: int) -> None:
        self._trying, self._left, self.now = None, HELD, self._manners[chosen]
        self._recent.clear()
        self._rival = math.inf
