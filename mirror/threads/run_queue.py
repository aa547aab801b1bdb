"""RunQueue: which replicas of a run move, which wait, and which replica gets the next turn.

It is plain data: it starts no thread, wakes none and runs no action. ``Lockstep`` does that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from time import monotonic
from types import FrameType

from mirror.threads.desync_report import mismatch
from mirror.threads.merge_point import MergePoint

LONG_SECONDS = 0.002
LOOKS = 4  # the shortest of so many turns counts: the first turns of a program are long


class RunQueue:
    """The turns of one run of replicas. See [Note: Turns] in ``lockstep.py``.

    A replica is in exactly one of ``runnable``, ``running``, ``waiting``, or has ended.

    Args:
        replica_ids: the replicas of the run, in the order of their first turns.

    Attributes:
        runnable: the replicas that wait for their turn, the next one first.
        running: the replicas that have their turn.
        waiting: by replica id, the merge point where a replica waits.
        frames: by replica id, the frame of a waiting replica.
        unstarted: the replicas that have had no turn yet.
        order: the replicas in the order of their turns since the last merge.
        num_turns: the number of turns given so far.
        latest: the replica of the last turn; -1 before the first one.
    """

    __slots__ = (
        *("runnable", "running", "waiting", "frames", "unstarted", "order", "num_turns"),
        "latest",
    )

    def __init__(self, replica_ids: Iterable[int] = ()) -> None:
        self.runnable = deque(replica_ids)
        self.running: set[int] = set()
        self.waiting: dict[int, MergePoint] = {}
        self.frames: dict[int, FrameType] = {}
        self.unstarted, self.order = set(self.runnable), list(self.runnable)
        self.num_turns, self.latest = 0, -1

    def next(self) -> int:
        """Gives the next replica its turn and returns it."""
        successor = self.runnable.popleft()
        self.running.add(successor)
        self.unstarted.discard(successor)
        self.num_turns, self.latest = self.num_turns + 1, successor
        return successor

    def drop_unstarted(self) -> None:
        """Removes the replicas that have not started, because the run has failed."""
        self.runnable = deque(r for r in self.runnable if r not in self.unstarted)

    def find_meeting(self) -> tuple[int, ...]:
        """Returns the replicas that meet at one merge point, if no replica runs any more.

        See [Note: Partial merge points]. If all replicas must meet and do not, returns none.
        """
        waiting, partial = self.waiting, list[int]()
        for r in sorted(waiting):
            if waiting[r].is_partial:
                partial.append(r)
        if partial:
            first = waiting[partial[0]]
            return tuple(r for r in partial if not mismatch((first, waiting[r])))
        if len(waiting) < len(self.order) or mismatch(waiting.values()):
            return ()
        return tuple(sorted(waiting))

    def release(self, last: int, meeting: Sequence[int]) -> None:
        """Makes the replicas that met runnable: the one that stopped last continues first."""
        before, self.order = self.order, [last]
        for r in reversed(before):
            if r != last:
                self.order.append(r)
        for r in self.order:
            if r in meeting:
                self.runnable.append(r)
                del self.waiting[r], self.frames[r]


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
