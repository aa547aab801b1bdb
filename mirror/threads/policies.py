"""Policies: how replicas move in a step, and the candidates from which each schedule chooses.

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

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
from torch.utils.hooks import RemovableHandle

from mirror.device.host import release_thread_pool
from mirror.threads.autotune import Autotuner


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
