"""Turns: which replicas move, which wait, and where; each passes its turn on when it stops."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

from mirror.device.openmp import release_thread_pool
from mirror.threads.baton import Baton
from mirror.threads.desync_report import describe_all, divergence, mismatch
from mirror.threads.merge_point import Act, Failure, MergePoint, act_at, just_act
from mirror.threads.replica_threads import ReplicaThreads
from mirror.threads.turn_timer import TurnTimer
from mirror.threads.user_frames import frame_of

Tasks = dict[int, Callable[[], Any]]


class RunQueue:
    """Who has the turn in one run of replicas. See [Note: Turns] in ``lockstep.py``.

    A replica is in exactly one of ``_runnable``, ``_running``, ``_waiting``, or has ended.

    Attributes:
        names: how messages call the replicas.
        pace: whether they compute for long.
        takes_turns: whether the replicas of this run move one at a time.
        is_eager: whether they start all at once.
        ends_teams: whether who gives the turn away ends its team. See [Note: Teams].
        usable: whether there may be another run: not once this was closed, or struck.
    """

    def __init__(self, names: tuple[str, ...], threads: ReplicaThreads, *, schedule: str) -> None:
        self.names, self._threads, self._schedule = names, threads, schedule
        # Whether an exception has come to our own code, after which nobody knows whose turn it is.
        self.usable, self._is_struck = True, False
        self.ends_teams = False
        self.pace, self._mutex, self._finished = TurnTimer(), threading.Lock(), Baton()
        self._begin_run({})

    def _begin_run(
        self, tasks: Tasks, at_once: bool | None = None, act: Act | None = None
    ) -> None:
        self._tasks, self._act = tasks, act or just_act
        self._threads.caller, self._threads.here = threading.current_thread(), None
        self._runnable = deque(tasks)  # in the order in which they get the turn
        self._running: set[int] = set()
        self._waiting: dict[int, MergePoint] = {}
        self._frames: dict[int, FrameType] = {}  # where those who wait stand
        self._meeting: tuple[int, ...] = ()  # the first of them is to act for all of them
        self._unstarted, self._order = set(tasks), list(tasks)  # order: since the last merge
        self._results, self._failure = dict[int, Any](), Failure()
        self._acting = False  # whether a merge's action runs, for which no deadline holds
        self._moves, self._latest = 0, -1  # how many turns there were; who has got the last one
        by_pace = self.pace.is_long and self._schedule == "concurrent"
        self.is_eager = by_pace if at_once is None else at_once
        self._staggers = self._schedule == "staggered" and at_once is not False
        self.takes_turns = not (self._staggers or self.is_eager)

    def dismiss(self) -> None:
        """Has every thread end when it next waits for its turn, if it ever does."""
        self.usable = False
        self._threads.dismiss()

    def _stop(self, replica_id: int, point: MergePoint | None) -> bool:
        """Gives the turn away, at a merge point or for good; returns whether it came back."""
        with self._mutex:
            self._running.discard(replica_id)
            if point is not None:
                self._waiting[replica_id] = point
                self._frames[replica_id] = sys._getframe()
            self.pace.end_turn()
            if self._is_struck:
                self._wake_all()
                return False
            if self._running:
                return False
            if self._runnable:
                return self._give_turns(replica_id)
            is_failed = self._failure.error is not None or not self._waiting
            met = () if is_failed else self._together()
            if not met:
                return self._go_on(replica_id, tuple(self._waiting))
            if replica_id not in met:
                self._meeting = met
                self._runnable.append(met[0])
                return self._give_turns(replica_id)
            self._running.add(replica_id)  # whom an interrupt must reach
        return self._meet(replica_id, met)

    def _meet(self, replica_id: int, met: tuple[int, ...]) -> bool:
        """Acts for those who have met, of whom this is one; returns whether it may go on."""
        self._merge(met)
        with self._mutex:
            self._running.discard(replica_id)
            return self._go_on(replica_id, met)

    def _give_turns(self, mine: int | None = None) -> bool:
        """Gives the turn to whom it is due; returns whether to ``mine``, who need not be woken."""
        came_back = False
        while self._runnable:
            successor = self._next()
            if successor == mine:
                came_back = True
            else:
                if self.ends_teams:
                    self._end_team()
                self._threads.wake(successor, near=self.takes_turns)
            if not self.is_eager:
                break
        return came_back

    def _next(self) -> int:
        successor = self._runnable.popleft()
        self._running.add(successor)
        self._unstarted.discard(successor)
        self._moves, self._latest = self._moves + 1, successor
        return successor

    def _together(self) -> tuple[int, ...]:
        """Returns who stand at one merge point; fails the run if that should be all, and is not.

        See [Note: Loose points].
        """
        waiting = self._waiting
        loose = [r for r in sorted(waiting) if waiting[r].is_loose]
        if loose:
            first = waiting[loose[0]]
            return tuple(r for r in loose if not mismatch((first, waiting[r])))
        if len(waiting) < len(self._order) or mismatch(waiting.values()):
            self._failure.error = divergence(self._tell_where())
            return ()
        return tuple(sorted(waiting))

    def _go_on(self, last: int, met: tuple[int, ...]) -> bool:
        """Lets those who met go on, once all have stopped; returns whether ``last`` may."""
        self._order = [last, *(r for r in reversed(self._order) if r != last)]
        self._runnable.extend(filter(met.__contains__, self._order))
        for r in met:
            del self._waiting[r], self._frames[r]
        if self._runnable:
            return self._give_turns(last)
        if self.ends_teams and last != self._threads.here:  # else the caller has this thread
            self._end_team()
        self._finished.post(near=self.takes_turns)
        return False

    def _merge(self, met: tuple[int, ...]) -> None:
        """Runs the action of a merge, while everybody else stands still.

        Without the mutex: the action may start a run of its own (merge_call), and the caller looks
        in on us.
        """
        try:
            self._acting = True
            self._results.update(act_at(self._waiting, met, self._act))
        finally:
            self._acting = False

    def _end_team(self) -> None:
        if self.takes_turns and release_thread_pool is not None:
            release_thread_pool()

    def _wake_all(self) -> None:
        """Has everybody who waits, the caller included, find that the run is over."""
        self.dismiss()
        with suppress(RuntimeError):  # it is open
            self._finished.post(near=False)

    def _tell_where(self) -> str:
        frames = self._frames | {r: frame_of(self._threads.threads_of(r)) for r in self._running}
        names = {r: self.names[r] for r in self._tasks}
        return describe_all(names, self._waiting, frames, self._runnable)
