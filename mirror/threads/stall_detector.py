"""Lookout: whether replicas that have the turn stand still, and who begins meanwhile.

[Note: Standing still]
A replica that waits for its GPU executes no Python: two looks find it at the same instruction.
Then the next one begins. If that one, too, is never seen to move, all do: they have come to the
same call, and with a pair of looks for each the last GPU would wait N times as long.

    look     1      2          3      4             5
    r0       seen   still      still  still
    r1              begins     seen   still
    r2, r3                            begin         seen

Looks come fast after a turn was given, when replicas block at the same place, and ever slower
while those that run move: each look takes the interpreter away from them for some microseconds.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Sequence
from time import monotonic

from mirror.threads.user_frames import positions

# Between two looks. A pause takes the system some 60 us longer than that.
FIRST_SECONDS = 0.00001
LAST_SECONDS = 0.0003


class StallDetector:
    """What the caller of a run has seen of its replicas.

    Args:
        limit: seconds for which no replica may move; infinite for ever.
        is_staggered: whether replicas begin when others stand still; otherwise it looks only
            whether turns are given, once in a limit.

    Attributes:
        pause_seconds: when to look again.
    """

    def __init__(self, limit: float, *, is_staggered: bool) -> None:
        self.pause_seconds = FIRST_SECONDS if is_staggered else limit
        self._limit, self._is_staggered = limit, is_staggered
        self._deadline = monotonic() + limit
        self._seen: tuple[int, Sequence[object]] | None = None
        self._num_standstills = 0  # in a row, with nothing but a first sight between them
        self._turns_given = -1  # how many there are if nobody but this has given any since

    def where(self, running: Iterable[threading.Thread]) -> Sequence[object]:
        """Returns what changes while any of these threads moves, beside turns."""
        return positions(running) if self._is_staggered else (None,)

    def poll(self, num_turns: int, where: Sequence[object], num_next: int) -> int:
        """Takes note of a look; returns how many replicas should be given their turn.

        Args:
            num_turns: how many turns have been given so far.
            where: of those that run; empty if they move for sure.
            num_next: how many wait for their turn.
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
