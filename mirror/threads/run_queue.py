"""RunQueue: which replicas run, which wait, and which replica gets the next turn."""

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
    """The turns of one run of replicas. See [Note: Turns] in ``lockstep.py``.

    A replica is in exactly one of ``_runnable``, ``_running``, ``_waiting``, or has ended.

    Attributes:
        names: the replicas' names in messages.
        pace: measures whether their turns are long.
        takes_turns: whether the replicas of this run move one at a time.
        is_eager: whether they all start at once.
        ends_teams: whether a thread that passes its turn on ends its OpenMP team. See
            [Note: Teams].
        usable: whether another run is possible; False once closed, or hit by an exception.
    """

    def __init__(self, names: tuple[str, ...], threads: ReplicaThreads, *, schedule: str) -> None:
        self.names, self._threads, self._schedule = names, threads, schedule
        # _is_struck: an exception has hit our own code, so the state of the turns is unknown.
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
        self._frames: dict[int, FrameType] = {}  # the frames of waiting replicas
        self._meeting: tuple[int, ...] = ()  # the first of them runs the action for all of them
        self._unstarted, self._order = set(tasks), list(tasks)  # order: since the last merge
        self._results, self._failure = dict[int, Any](), Failure()
        self._acting = False  # whether a merge's action runs; it has no deadline
        self._moves, self._latest = 0, -1  # the number of turns; the replica of the last turn
        by_pace = self.pace.is_long and self._schedule == "concurrent"
        default = by_pace or self._schedule == "parallel"
        self.is_eager = default if at_once is None else at_once
        self._staggers = self._schedule == "staggered" and at_once is not False
        self.takes_turns = not (self._staggers or self.is_eager)

    def dismiss(self) -> None:
        """Makes every thread end when it next waits for its turn."""
        self.usable = False
        self._threads.dismiss()

    def _stop(self, replica_id: int, point: MergePoint | None) -> bool:
        """Passes the turn on, at a merge point or at the end; returns whether it came back."""
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
            meeting = () if is_failed else self._find_meeting()
            if not meeting:
                return self._go_on(replica_id, tuple(self._waiting))
            if replica_id not in meeting:
                self._meeting = meeting
                self._runnable.append(meeting[0])
                return self._give_turns(replica_id)
            self._running.add(replica_id)  # so that an interrupt reaches it
        return self._meet(replica_id, meeting)

    def _meet(self, replica_id: int, meeting: tuple[int, ...]) -> bool:
        """Runs the action for the meeting replicas; returns whether this one may continue."""
        self._merge(meeting)
        with self._mutex:
            self._running.discard(replica_id)
            return self._go_on(replica_id, meeting)

    def _give_turns(self, mine: int | None = None) -> bool:
        """Wakes the next replicas; returns whether ``mine`` is one, which needs no waking."""
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

    def _find_meeting(self) -> tuple[int, ...]:
        """Returns the replicas that meet at one merge point. See [Note: Loose points].

        If all replicas must meet and do not, fails the run and returns none.
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

    def _go_on(self, last: int, meeting: tuple[int, ...]) -> bool:
        """Makes the replicas that met runnable; returns whether ``last`` may continue."""
        self._order = [last, *(r for r in reversed(self._order) if r != last)]
        self._runnable.extend(filter(meeting.__contains__, self._order))
        for r in meeting:
            del self._waiting[r], self._frames[r]
        if self._runnable:
            return self._give_turns(last)
        if self.ends_teams and last != self._threads.here:  # else the caller has this thread
            self._end_team()
        self._finished.post(near=self.takes_turns)
        return False

    def _merge(self, meeting: tuple[int, ...]) -> None:
        """Runs the action of a merge while all other replicas wait.

        Does not hold the mutex: the action may start a run of its own (merge_call), and the
        caller polls this queue.
        """
        try:
            self._acting = True
            self._results.update(act_at(self._waiting, meeting, self._act))
        finally:
            self._acting = False

    def _end_team(self) -> None:
        if self.takes_turns and release_thread_pool is not None:
            release_thread_pool()

    def _wake_all(self) -> None:
        """Wakes all waiting threads, the caller included: the run is over."""
        self.dismiss()
        with suppress(RuntimeError):  # it is posted already
            self._finished.post(near=False)

    def _tell_where(self) -> str:
        frames = self._frames | {r: frame_of(self._threads.threads_of(r)) for r in self._running}
        names = {r: self.names[r] for r in self._tasks}
        return describe_all(names, self._waiting, frames, self._runnable)
