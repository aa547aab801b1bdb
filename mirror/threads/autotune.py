"""Autotuner: measures steps under each candidate policy, then keeps the fastest policy."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Generic, Protocol, TypeVar

_logger = logging.getLogger("mirror")

WARM = 2  # steps before the first measured one: they allocate state, threads and pools
LOOKS = 4  # measured steps per policy
HELD = 1000  # steps until the policies are measured again
UNLIKE = 4  # consecutive steps of a different size that trigger a new measurement
WINDOW = 16  # steps whose fastest is compared with the times of the other policies
MOST_TRIED = 16  # at most so many steps under one policy during a measurement
WORTH = 0.97  # a policy must take at most this part of another policy's time to replace it


class HasName(Protocol):
    """A policy with its name in messages."""

    @property
    def name(self) -> str:
        """The replicas' action, as in "the replicas take turns"."""


M = TypeVar("M", bound=HasName)


class Autotuner(Generic[M]):
    """Measures the steps of a program under each policy in turn, then keeps the fastest policy.

    ::

        step      1 2 | 3 4 5 6 | 7 8 9 10 | 11 ... 1010 | 1011 ...
        policy    1st |   1st   |   2nd    | the fastest |  1st ...

    The fastest step under each policy counts, not the median: on a shared machine, most of the
    variation comes from other processes. Only steps of equal size are compared, and a measurement
    begins after two of them. The policies are measured again

    - after 1000 steps;
    - after four consecutive steps with more than twice, or less than half, the measured size;
    - if the fastest of 16 steps takes longer than another policy took: the load of the machine
      has changed.

    Args:
        candidates: returns the policies; the first one stays unless another one is faster. It is
            called before each measurement.
        clock: in seconds.

    Attributes:
        now: the policy of the coming step.
    """

    def __init__(
        self, candidates: Callable[[], Sequence[M]], clock: Callable[[], float] = perf_counter
    ) -> None:
        self._ask, self._clock = candidates, clock
        self._policies = tuple(candidates())
        self.now = self._policies[0]
        self._size = self._last_size = 0.0  # examples per measured step; per last step
        self._trying: int | None = None  # the index of the policy that is measured
        self._num_remaining, self._unlike = WARM, 0
        self._seconds: list[list[float]] = []
        self._recent: list[float] = []  # step times under the current policy
        self._rival = math.inf  # the fastest step under any other policy
        self._last = clock()

    def step_ended(self, size: float) -> None:
        """Records the end of a step and selects the policy of the next one.

        Args:
            size: the number of examples of the step; 0 if unknown.
        """
        now = self._clock()
        seconds, self._last = now - self._last, now
        is_steady, self._last_size = size == self._last_size, size
        self._num_remaining -= 1
        if self._trying is None:
            is_unlike = not self._size / 2 <= size <= self._size * 2
            self._unlike = self._unlike + 1 if is_unlike else 0
            is_other = self._unlike >= UNLIKE and bool(self._seconds)
            if size == self._size:
                self._recent.append(seconds)
            if is_steady and (self._num_remaining <= 0 or is_other or self._is_beaten()):
                self._begin(size)
            return
        if size == self._size:
            self._seconds[self._trying].append(seconds)
        if len(self._seconds[self._trying]) >= LOOKS or self._num_remaining <= 0:
            self._try_next()

    def _is_beaten(self) -> bool:
        if len(self._recent) < WINDOW:
            return False
        least = min(self._recent)
        self._recent.clear()
        return least * WORTH > self._rival

    def _begin(self, size: float) -> None:
        self._policies, self._size = tuple(self._ask()), size
        self._seconds, self._unlike = [[] for _ in self._policies], 0
        if len(self._policies) == 1:
            self._hold(0)
        else:
            self._trying, self._num_remaining, self.now = 0, MOST_TRIED, self._policies[0]

    def _try_next(self) -> None:
        assert self._trying is not None
        self._trying += 1
        if self._trying < len(self._policies):
            self._num_remaining, self.now = MOST_TRIED, self._policies[self._trying]
            return
        fastest = [min(seconds, default=math.inf) for seconds in self._seconds]
        chosen = next(i for i, least in enumerate(fastest) if least * WORTH <= min(fastest))
        self._hold(chosen)
        self._rival = min(least for i, least in enumerate(fastest) if i != chosen)
        timings = ", ".join(
            f"{least * 1e3:.3g} ms where they {policy.name}"
            for policy, least in zip(self._policies, fastest, strict=True)
        )
        _logger.info(
            "schedule: the replicas %s from now on; the fastest of %d steps of %g examples took "
            "%s; to be measured again after %d steps",
            self.now.name,
            LOOKS,
            self._size,
            timings,
            HELD,
        )

    def _hold(self, chosen: int) -> None:
        self._trying, self._num_remaining, self.now = None, HELD, self._policies[chosen]
        self._recent.clear()
        self._rival = math.inf
