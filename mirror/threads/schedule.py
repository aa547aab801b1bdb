"""Schedule: how the replicas of a strategy move in a step.

    schedule      replicas inside run                          backward passes outside run
    lockstep      take turns                                   one replica after the other
    auto          take turns                                   all at once, if they are long
    staggered     GPUs: the next one starts at backward, or    all at once
                  when one stalls: [Note: Staggered]
                  simulated devices: at once if turns are long
    parallel      all at once                                  all at once

Under "parallel", and "staggered" on GPUs, ``ParallelRuns`` makes some runs take turns.

"lockstep" and "auto" keep the order: bits, draws and side effects are the same every time. "auto"
on GPUs is one of the others: see ``strategy/mirrored.py``.

[Note: Long passes]
Problem: two backward passes at once save time only if a pass is much longer than the start of a
thread. Two CPU cores took 1.3 to 1.6 of the time of turns for steps of 1 to 3 ms, as much for one
of 30 ms, and 0.7 for steps of 100 ms (2 simulated devices, one intra-op thread each).
Rule: "auto" runs passes at once after four steps with passes of more than 10 ms each; it
returns to turns if all at once they take less than 4 ms. Only the duration of a step depends on
that, not its result: it needs enough CPUs for the caller's number of intra-op threads on each
replica, since the bits of a sum depend on that number, and a program without hooks of its own,
which would be called in another order: [Note: Graph boundaries] in
``replica/gradients/parallel_backward.py``.

[Note: Stalls]
``StallDetector`` finds running replicas that stall on their device, so that the next can start.
Problem: a replica that waits for its GPU executes no Python, while the next replica could start.
Rule: if two polls find it at one instruction of one call, the next one starts. If that one also
never moves, all start: they block in the same call, and one pair of polls per replica would delay
the last GPU N times as long.

    poll     1      2          3      4             5
    r0       seen   stalled    stalled stalled
    r1              starts     seen   stalled
    r2, r3                            start         seen

A launch takes 20 us to 1 ms, in which its thread executes no Python; neither does a thread that
waits for the interpreter. So only what lasts for 1.5 ms is a stall. With polls 70 us apart, all
replicas of a ResNet-50 ran at once after three launches. Each launch then ended with a hand-over
of the interpreter between CPUs, which takes 30 to 90 us.

Each poll takes the interpreter from the running replicas for some microseconds. It gets it when
one of them launches, so it finds a replica in a launch more often than not: the same instruction
in two calls of one function is no stall. See ``positions``.
"""

from __future__ import annotations

import math
import os
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from time import monotonic

import torch
from torch.utils.hooks import RemovableHandle

from mirror.threads.user_frames import positions

AUTO, LOCKSTEP, PARALLEL = "auto", "lockstep", "parallel"

LONG_PASS_SECONDS, SHORT_PASS_SECONDS = 0.010, 0.004  # of the backward passes of a step
NUM_STEPS = 4  # consecutive steps that decide


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


class Schedule:
    """The schedule of a strategy.

    Args:
        name: ``"lockstep"``, ``"staggered"``, ``"concurrent"`` (staggered, on simulated devices),
            ``"parallel"`` or ``"auto"``.

    Attributes:
        of_turns: the schedule of the replicas' locksteps. See [Note: Turns].
        keeps_order: whether replicas draw, print and sum in the order of ``"lockstep"``.
        watches_passes: whether ``end_step`` is to be called.
        passes_at_once: whether backward passes outside ``run`` run at once, although the schedule
            keeps the order. See [Note: Long passes].
    """

    def __init__(self, name: str) -> None:
        self.of_turns = LOCKSTEP if name == AUTO else name
        self.keeps_order = name in (AUTO, LOCKSTEP)
        self.watches_passes = name == AUTO
        self.passes_at_once = False
        self._seconds: deque[float] = deque(maxlen=NUM_STEPS)
        self._num_hooks = 0  # of the program, when passes began to run at once

    def end_step(self, seconds: float) -> None:
        """Decides how the passes of the next step run.

        Args:
            seconds: the duration of the last step's backward passes outside ``run``.
        """
        recent = self._seconds
        recent.append(seconds)
        are_all = len(recent) == NUM_STEPS
        if self.passes_at_once:
            are_short = are_all and max(recent) < SHORT_PASS_SECONDS
            if are_short or not (_has_cpus() and self.may_go_backward_at_once()):
                self.passes_at_once = False
                recent.clear()
        elif are_all and min(recent) > LONG_PASS_SECONDS and _has_cpus():
            self.passes_at_once, self._num_hooks = True, num_hooks()
            recent.clear()

    def may_go_backward_at_once(self) -> bool:
        """Whether a backward pass outside ``run`` may run at once: no hook may be in it."""
        if not self.keeps_order:
            return True
        return self.passes_at_once and num_hooks() == self._num_hooks != -1


def _has_cpus() -> bool:
    """Whether two replicas may each use as many CPUs as the caller has intra-op threads."""
    if hasattr(os, "sched_getaffinity"):
        num_cpus = len(os.sched_getaffinity(0))
    else:
        num_cpus = os.cpu_count() or 1
    return 2 * torch.get_num_threads() <= num_cpus


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


# Between two polls: after a turn has begun, and while the running replicas move. The system adds
# some 60 us to each pause.
FIRST_SECONDS = 0.0015
LAST_SECONDS = 0.003


class StallDetector:
    """Polls the replicas of one run, on behalf of the caller of the run.

    Args:
        limit: seconds after which a run without movement is overdue; may be infinite.
        is_staggered: whether replicas start when others stall. Otherwise it checks only that
            turns are given, once per limit.

    Attributes:
        pause_seconds: the time until the next poll.
    """

    def __init__(self, limit: float, *, is_staggered: bool) -> None:
        self.pause_seconds = FIRST_SECONDS if is_staggered else limit
        self._limit, self._is_staggered = limit, is_staggered
        self._deadline = monotonic() + limit
        self._seen: tuple[int, Sequence[object]] | None = None
        self._num_standstills = 0  # consecutive stalls, with only a first poll between them
        self._turns_given = -1  # the number of turns if only this detector has given any since

    def sample_positions(self, running: Iterable[threading.Thread]) -> Sequence[object]:
        """Returns a value that changes while any of these threads executes Python."""
        return positions(running) if self._is_staggered else (None,)

    def poll(self, num_turns: int, where: Sequence[object], num_next: int) -> int:
        """Records a poll; returns the number of replicas that should get their turn.

        Args:
            num_turns: the number of turns given so far.
            where: the positions of the running replicas; empty if they certainly move.
            num_next: the number of replicas that wait for their turn.
        """
        before, self._seen = self._seen, (num_turns, where)
        if before != self._seen or not where:
            self._deadline = monotonic() + self._limit
        if not self._is_staggered:
            return 0
        is_still = before == self._seen and bool(where)
        if is_still and num_next:
            num_due = num_next if self._num_standstills else 1
            self._num_standstills += 1
            self._turns_given = num_turns + num_due
            self.pause_seconds = FIRST_SECONDS
            return num_due
        has_new_turn = before is None or before[0] != num_turns
        if not (has_new_turn and num_turns == self._turns_given):
            self._num_standstills = 0
        self.pause_seconds = (
            FIRST_SECONDS if has_new_turn else min(2 * self.pause_seconds, LAST_SECONDS)
        )
        return 0

    @property
    def is_overdue(self) -> bool:
        """Whether no replica has moved for the limit."""
        return self._limit != math.inf and monotonic() > self._deadline
