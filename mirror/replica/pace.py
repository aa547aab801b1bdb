"""Pace: whether replicas that may run at once should all start at once.

Python runs in one thread at a time, and to pass it on costs more than a small operation takes. So
replicas of small operations take turns until they begin a backward pass, which needs no Python;
where the first of them keeps its turn for longer, they all start at once.
"""

from __future__ import annotations

from collections import deque
from time import monotonic

LONG_SECONDS = 0.001
LOOKS = 4  # the shortest of so many turns counts, of runs in which one replica started alone


class Pace:
    """How long the first replica of a run keeps its turn.

    Attributes:
        is_eager: whether all replicas of this run start at once.
    """

    __slots__ = ("_began", "_seconds", "is_eager")

    def __init__(self) -> None:
        self.is_eager = False
        self._began: float | None = None
        self._seconds: deque[float] = deque(maxlen=LOOKS)

    def begin_run(self) -> None:
        """Decides for the run that begins."""
        self.is_eager = len(self._seconds) == LOOKS and min(self._seconds) > LONG_SECONDS
        self._began = None if self.is_eager else monotonic()

    def end_turn(self) -> None:
        """Notes that a turn has ended; the first one counts."""
        if self._began is not None:
            self._seconds.append(monotonic() - self._began)
            self._began = None
