"""Policies: how replicas move in a step, and how the fastest one of a schedule is found.

[Note: Measured policies]
Problem: the fastest policy depends on the program and on the machine. So on simulated devices two
schedules measure their candidates with ``Autotuner``:

    schedule     candidates                                            guarantee
    auto         take turns                                            the bits of lockstep, and
                 take turns, end OpenMP teams  if several threads      its order of side effects
                 run backward passes at once   if CPUs are free
    concurrent   move at once                  if turns are long       equal values, except for
                 take turns                                            rounding and random draws

"parallel" has one policy: it always moves at once, but for the runs that ``ParallelRuns`` in
``execution/parallel_runs.py`` makes take turns.

Rule: "auto" never runs the user's functions or forwards at once: they may draw, print or append.
It runs only backward passes without hooks at once, [Note: Graph boundaries] in
``replica/gradients/parallel_backward.py``, and only with enough CPUs for the caller's number of
intra-op threads on each replica: the bits of a sum depend on that number.
"""

from __future__ import annotations

import logging
import math
import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic, perf_counter
from typing import Generic, Protocol, TypeVar

import torch
from torch.utils.hooks import RemovableHandle

from mirror.device.host import release_thread_pool


class _Own:
    """The number of hooks that this package has registered."""

    count = 0


def num_hooks() -> int:
    """Returns the number of hooks that the program has registered; -1 if torch does not count."""
    num_all: int | None = getattr(RemovableHandle, "next_id", None)
    return -1 if num_all is None else num_all - _Own.count


def count_own_hooks(count: int) -> None:
    """Excludes hooks that this package has just registered from ``num_hooks``."""
    _Own.count += count


AUTO, LOCKSTEP, STAGGERED, CONCURRENT = "auto", "lockstep", "staggered", "concurrent"
PARALLEL = "parallel"


@dataclass(frozen=True)
class Policy:
    """How replicas move in a step.

    Attributes:
        name: the replicas' action in messages, "take turns".
        moves_at_once: whether replicas start at once if their turns are long; see ``TurnTimer``.
        passes_at_once: whether backward passes outside ``run`` run at once where they can.
        ends_teams: whether a thread that passes its turn on ends its OpenMP team. See
            ``host.py``.
        shares_threads: whether the replicas share the caller's intra-op threads.
    """

    name: str
    moves_at_once: bool = False
    passes_at_once: bool = False
    ends_teams: bool = False
    shares_threads: bool = False


IN_TURN = Policy("take turns")
ENDING_TEAMS = Policy("take turns, and end their teams", ends_teams=True)
BACKWARD_AT_ONCE = Policy("go backward at once", passes_at_once=True)
AT_ONCE = Policy("move at once", moves_at_once=True, shares_threads=True)
_ALONE = Policy("move as the schedule says")


def policies_of(schedule: str, *, num_threads: int, num_cpus: int) -> tuple[Policy, ...]:
    """Returns the candidates of a schedule; it begins with the first one.

    Args:
        num_threads: intra-op threads of the caller.
        num_cpus: CPUs that this process may use.
    """
    has_teams = num_threads > 1 and release_thread_pool is not None
    if schedule == PARALLEL:
        return (AT_ONCE,)
    if schedule == CONCURRENT:
        return AT_ONCE, ENDING_TEAMS if has_teams else IN_TURN
    if schedule != AUTO:
        return (_ALONE,)
    ending = (ENDING_TEAMS,) if has_teams else ()
    at_once = (BACKWARD_AT_ONCE,) if 2 * num_threads <= num_cpus else ()
    return IN_TURN, *ending, *at_once


class Schedule:
    """The schedule of a strategy, and the policy that it currently uses.

    Args:
        name: ``"lockstep"``, ``"staggered"``, ``"concurrent"``, ``"parallel"`` or ``"auto"``.
        clock: in seconds.

    Attributes:
        policy: the policy of the coming step.
        may_move_at_once: whether replicas may start at once in it if ``of_turns`` allows that.
        of_turns: the schedule of the replicas' locksteps. See [Note: Turns].
        keeps_order: whether replicas draw, print and sum in the order of ``"lockstep"``.
        is_measured: whether there may be several candidates.
        sizes: the examples of each replica in the last run, if known.
        num_hooks: the program's hooks at the last measurement.
    """

    def __init__(self, name: str, clock: Callable[[], float] = perf_counter) -> None:
        self._name = name
        self.of_turns = LOCKSTEP if name == AUTO else name
        self.keeps_order = name in (AUTO, LOCKSTEP)
        self.is_measured = name in (AUTO, CONCURRENT)
        self.sizes: Sequence[float] = ()
        self.num_hooks = 0
        self._clock = clock
        self._begin()

    def step_ended(self) -> None:
        """Records the end of a step; the next one may use another policy."""
        if torch.get_num_threads() != self._num_threads:
            self._begin()
        self._autotuner.step_ended(sum(self.sizes))
        if self._autotuner.now is not self.policy:
            self._take(self._autotuner.now)

    def may_go_backward_at_once(self) -> bool:
        """Whether a backward pass outside ``run`` may run at once: no hook may be in it."""
        if not self.keeps_order:
            return True
        return self.policy.passes_at_once and num_hooks() == self.num_hooks != -1

    def _begin(self) -> None:
        self._num_threads = torch.get_num_threads()
        self._autotuner = Autotuner(self._candidates, self._clock)
        self._take(self._autotuner.now)

    def _take(self, policy: Policy) -> None:
        self.policy = policy
        self.may_move_at_once = self._name != CONCURRENT or policy.moves_at_once

    def _candidates(self) -> tuple[Policy, ...]:
        self.num_hooks = num_hooks()
        return policies_of(self._name, num_threads=self._num_threads, num_cpus=_num_cpus())


def _num_cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


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


LONG_TURN_SECONDS = 0.002
NUM_TURNS = 4  # the shortest of so many turns counts: the first turns of a program are long


class TurnTimer:
    """Measures how long the first replica that stops in a run has kept its turn.

    Python runs in one thread at a time. Waking another CPU, or waiting for the interpreter there,
    costs more than a small operation. So replicas with short turns share one CPU, and replicas
    with long turns run at once. Turns get longer when replicas run at once, so a decision does
    not undo itself.

    Attributes:
        is_long: whether the replicas of the next run should run at once.
    """

    __slots__ = ("_began", "_keeps_turns", "_seconds", "is_long")

    def __init__(self) -> None:
        self.is_long = self._keeps_turns = False
        self._began: float | None = None
        self._seconds: deque[float] = deque(maxlen=NUM_TURNS)

    def begin_turn(self) -> None:
        """Starts the clock."""
        self._began = monotonic()

    def end_turn(self) -> None:
        """Stops the clock; only the first call after ``begin_turn`` counts."""
        if self._began is not None:
            self._seconds.append(monotonic() - self._began)
            self._began = None
            is_long = len(self._seconds) == NUM_TURNS and min(self._seconds) > LONG_TURN_SECONDS
            self.is_long = is_long and not self._keeps_turns

    def keep_turns(self) -> None:
        """Makes replicas take turns from the next run on, permanently."""
        self.is_long, self._keeps_turns = False, True
