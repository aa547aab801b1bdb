"""How many hooks a program has made, of tensors, nodes, modules: whether it makes any more.

Manners: how replicas move in a step, and what each schedule may choose from.

[Note: Measured manners]
What is faster depends on the program and on the machine, so on simulated devices two schedules
choose by the clock, see ``Autotuner``, among manners that differ in nothing else that a program
may rely on:

    schedule     manners                                                     what is promised
    auto         take turns                                                  lockstep's bits, and
                 take turns, and end their teams   with several threads      its order of all that
                 go backward at once               with CPUs to spare        the program does
    staggered    move at once                      where turns are long      equal values but for
                 take turns                                                  rounding and draws
    lockstep     take turns                                                  as auto

Why "auto" has the user's functions, and the forwards of modules, take turns always: at once they
would draw from the CPU's one generator, print, and append to lists in the order in which they
come, and no look at a step tells whether the next one does. What is left to be done at once is a
backward pass outside ``run`` that comes apart at seams, [Note: Seams] in
``replica/gradients/graph_boundary.py``: nodes in C++, which draw nothing, without any hook. Its
bits are those of turns only with as many intra-op threads each: sums are divided by their number.
So it is tried where the CPUs are enough for that.

"staggered" promises less, and shares the threads of the caller among those that move at once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
from torch.utils.hooks import RemovableHandle

from mirror.device.openmp import release_thread_pool
from mirror.threads.autotune import Autotuner


class _Own:
    """How many of them are not the program's."""

    count = 0


def num_hooks() -> int:
    """Returns the number of hooks that the program has made so far; -1 where nobody counts."""
    made: int | None = getattr(RemovableHandle, "next_id", None)
    return -1 if made is None else made - _Own.count


def count_own_hooks(count: int) -> None:
    """Leaves out of account the hooks that a part of this package has just made."""
    _Own.count += count


AUTO, LOCKSTEP, STAGGERED, CONCURRENT = "auto", "lockstep", "staggered", "concurrent"


@dataclass(frozen=True)
class Policy:
    """How replicas move in a step.

    Attributes:
        name: what they do, for messages.
        moves_at_once: whether replicas start at once where their turns are long; see ``Pace``.
        passes_at_once: whether backward passes outside ``run`` do what they can at once.
        ends_teams: whether who gives the turn away ends its team. See [Note: Teams].
        shares_threads: whether they share the caller's intra-op threads.
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
    """Returns what a schedule may choose from, what it begins with first.

    Args:
        num_threads: intra-op threads of the caller.
        num_cpus: that this process may use.
    """
    has_teams = num_threads > 1 and release_thread_pool is not None
    if schedule == CONCURRENT:
        return AT_ONCE, ENDING_TEAMS if has_teams else IN_TURN
    if schedule != AUTO:
        return (_ALONE,)
    ending = (ENDING_TEAMS,) if has_teams else ()
    at_once = (BACKWARD_AT_ONCE,) if 2 * num_threads <= num_cpus else ()
    return IN_TURN, *ending, *at_once


class Schedule:
    """How the replicas of a strategy take turns, now.

    Args:
        name: ``"lockstep"``, ``"staggered"``, ``"concurrent"`` or ``"auto"``.
        clock: in seconds.

    Attributes:
        manner: of the coming step.
        may_move_at_once: whether replicas start at once in it if ``of_turns`` says so.
        of_turns: what the replicas' locksteps are made with. See [Note: Turns].
        keeps_order: whether replicas draw, print and sum as under ``"lockstep"``.
        is_measured: whether there may be several manners.
        sizes: of the replicas' parts in the last run, where they are known.
        num_hooks: how many the program had made when it was last decided.
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
        """Notes that a step has ended: the next one may be taken in another manner."""
        if torch.get_num_threads() != self._num_threads:
            self._begin()
        self._contest.step_ended(sum(self.sizes))
        if self._contest.now is not self.manner:
            self._take(self._contest.now)

    def may_go_backward_at_once(self) -> bool:
        """Whether a backward pass outside ``run`` may come apart: not if a hook might be in it."""
        if not self.keeps_order:
            return True
        return self.manner.passes_at_once and num_hooks() == self.num_hooks != -1

    def _begin(self) -> None:
        self._num_threads = torch.get_num_threads()
        self._contest = Autotuner(self._candidates, self._clock)
        self._take(self._contest.now)

    def _take(self, manner: Policy) -> None:
        self.manner = manner
        self.may_move_at_once = self._name != CONCURRENT or manner.moves_at_once

    def _candidates(self) -> tuple[Policy, ...]:
        self.num_hooks = num_hooks()
        return policies_of(self._name, num_threads=self._num_threads, num_cpus=_num_cpus())


def _num_cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
