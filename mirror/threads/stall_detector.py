"""StallDetector: finds running replicas that stall on their device, so that the next can start.

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
import threading
from collections.abc import Iterable, Sequence
from time import monotonic

from mirror.threads.user_frames import positions

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
