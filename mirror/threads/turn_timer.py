"""TurnTimer: decides whether the turns of replicas are long enough to run the replicas at once.

Python runs in one thread at a time. Waking another CPU, or waiting for the interpreter there,
costs more than a small operation. So replicas with short turns share one CPU, and replicas with
long turns run at once.
"""

from __future__ import annotations

from collections import deque
from time import monotonic

LONG_SECONDS = 0.002
LOOKS = 4  # the shortest of so many turns counts: the first turns of a program are long


class TurnTimer:
    """Measures how long the first replica that stops in a run has kept its turn.

    Turns get longer when replicas run at once, so a decision does not undo itself.

    Attributes:
        is_long: whether the replicas of the next run should run at once.
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
        """Stops the clock; only the first call after ``begin_turn`` counts."""
        if self._began is not None:
            self._seconds.append(monotonic() - self._began)
            self._began = None
            is_long = len(self._seconds) == LOOKS and min(self._seconds) > LONG_SECONDS
            self.is_long = is_long and not self._keeps_turns

    def keep_turns(self) -> None:
        """Makes replicas take turns from the next run on, permanently."""
        self.is_long, self._keeps_turns = False, True
