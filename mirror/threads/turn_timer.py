"""Pace: whether replicas compute for so long between merges that they should run at once.

Python runs in one thread at a time, and to wake another CPU, or to wait for the interpreter there,
costs more than a small operation takes. So replicas of small operations take turns on one CPU;
where the first of them keeps its turn for longer, they run at once.
"""

from __future__ import annotations

from collections import deque
from time import monotonic

LONG_SECONDS = 0.002
LOOKS = 4  # the shortest of so many turns counts: the first ones of a program are long


class TurnTimer:
    """How long the first replica of a run that stops has kept its turn.

    Turns get longer where replicas run at once, so one decision does not undo itself.

    Attributes:
        is_long: whether the next run should let the replicas run at once.
    """

    __slots__ = ("_began", "_keeps_turns", "_seconds", "is_long")

    def __init__(self) -> None:
        self.is_long = self._keeps_turns = False
        self._began: float | None = None
        self._seconds: deque[float] = deque(maxlen=LOOKS)

    def begin_turn(self) -> None:
        """Starts the clock."""
        self._began = monotonic()

    def end_turn(self) -> None:
        """Notes that a turn has ended; the first one after ``begin_turn`` counts."""
        if self._began is not None:
            self._seconds.append(monotonic() - self._began)
            self._began = None
            is_long = len(self._seconds) == LOOKS and min(self._seconds) > LONG_SECONDS
            self.is_long = is_long and not self._keeps_turns

    def keep_turns(self) -> None:
        """Has replicas take turns from the next run on, for good."""
        self.is_long, self._keeps_turns = False, True
