"""Lockstep: one thread per replica, and they take turns between merge points.

[Note: Turns]
The replica whose turn it is goes on until it returns or reaches a merge point; then the next one
gets the turn. When all stand at the same merge point, the last one to arrive runs its action once,
for all of them, and goes on first, so that N replicas pay N - 1 hand-overs per merge:

    turn      0    1    2 | merge | 2    1    0 | merge | 0    1    2 | all returned
    thread    r0 > r1 > r2          r2 > r1 > r0          r0 > r1 > r2

    schedule     who is given the turn
    lockstep     the next one, when one stops. The first replica runs in the caller's thread, which
                 saves two hand-overs, and so does the next one if that has returned; with a
                 timeout, which the caller watches, they all have threads of their own
    staggered    also the next one when those that have it stand still on their device, see
                 [Note: Standing still], or say that they will: ``let_next_begin``
    concurrent   as under lockstep, or all at once where they compute for long: what "staggered"
                 is on simulated devices. They share the caller's intra-op threads

So nothing but the determinism of the simulation may rest on "only one runs".

Because everybody's state is known here, divergence is seen, not suffered: when all have stopped
and they do not stand at one point, the run fails with the line where each stands.
"""

from __future__ import annotations

import math
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

from mirror.concurrency.failure import Failure
from mirror.concurrency.lookout import Lookout
from mirror.concurrency.merge_point import Act, MergePoint, Raised, Released, just_act
from mirror.concurrency.pace import Pace
from mirror.concurrency.stack import call_noted, callees_of, frame_of, raise_in
from mirror.concurrency.standstill import are_unlike, divergence, timeout, where_all_stand
from mirror.concurrency.threads import Threads
from mirror.concurrency.wake import Gate
from mirror.errors import CollectiveTimeoutError

# How long an interrupted run waits for its threads before it abandons them.
DRAIN_SECONDS = 5.0

Tasks = dict[int, Callable[[], Any]]


class Lockstep:
    """The threads of one group of replicas; runs one set of tasks at a time.

    A replica in it is in exactly one of ``_runnable``, ``_running``, ``_waiting``, or has ended.

    Args:
        names: how messages call the replicas, ``"replica 2 of 4 (cuda:2)"``.
        schedule: ``"lockstep"``, ``"staggered"`` or ``"concurrent"``, see [Note: Turns].
        timeout_seconds: how long no replica may move before the run fails; ``None``: for ever.

    Attributes:
        takes_turns: whether the replicas of this run move one at a time.
        is_eager: whether they start all at once.
        usable: whether it may run tasks again.
    """

    def __init__(
        self, names: tuple[str, ...], *, schedule: str, timeout_seconds: float | None
    ) -> None:
        self.names, self.usable, self._schedule = names, True, schedule
        self.break_off: Callable[[], object] = bool  # ends the waits of devices, by whoever set it
        self._limit = math.inf if timeout_seconds is None else timeout_seconds
        self.pace, self._mutex = Pace(), threading.Lock()
        self._finished, self._threads = Gate(), Threads(names, self._work)
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
        self._unstarted, self._order = set(tasks), list(tasks)  # order: since the last merge
        self._results, self._failure = dict[int, Any](), Failure()
        # Whether a merge's action runs, for which no deadline holds; whether one who waited was.
        self._acting = self._interrupted = False
        self._moves, self._latest = 0, -1  # how many turns there were; who has got the last one
        wants_all = self.pace.is_long if at_once is None else at_once
        self.is_eager = wants_all and self._schedule == "concurrent"
        self._staggers = self._schedule == "staggered" and at_once is not False
        self.takes_turns = not (self._staggers or self.is_eager)

    def run(
        self, tasks: Tasks, *, at_once: bool | None = None, act: Act | None = None
    ) -> dict[int, Any]:
        """Runs one task per replica id and returns their results by replica id.

        Args:
            at_once: whether all may start at once, or in order for sure; ``None``: by their pace.
            act: runs the actions of merge points; ``None``: they are just called.

        Raises:
            DivergenceError: the replicas did not all reach the same merge points.
            CollectiveTimeoutError: no replica moved for ``timeout_seconds``.
            BaseException: what a task raised, with a note that names the replica.
        """
        self._begin_run(tasks, at_once, act)
        if len(tasks) == 1:
            replica_id, task = tasks.popitem()
            try:
                return {replica_id: call_noted(task, self.names[replica_id])}
            finally:
                self._begin_run({})
        self.pace.begin_turn()
        if self.takes_turns and self._limit == math.inf:
            self._run_here()
        else:
            with self._mutex:  # the first ones may stop before all have been given their turn
                self._give_turns()
            self._await()
        failure, results = self._failure, self._results
        self._begin_run({})  # keeps nothing of this run alive
        if failure.error is not None:
            if not self.usable:
                self.dismiss()
            failure.throw(self.names)
        return {replica_id: results[replica_id] for replica_id in tasks}

    def merge(self, replica_id: int, point: MergePoint) -> Any:
        """Stops the calling replica at ``point`` until all have reached it; returns its result."""
        if len(self._order) < 2:
            return self._act(point.action, {replica_id: point.payload})[replica_id]
        if self._failure.error is not None or self._threads.dismissed:
            raise Released
        try:
            if not self._stop(replica_id, point):
                self._threads.wait(replica_id)
        except BaseException:  # an interrupt: this replica will not take its turn
            self._interrupted = True
            with self._mutex, suppress(ValueError):
                self._waiting.pop(replica_id, None)
                self._runnable.remove(replica_id)
            raise
        if self._failure.error is not None or self._threads.dismissed:
            raise Released
        outcome = self._results.pop(replica_id)
        if isinstance(outcome, Raised):
            raise outcome.error
        return outcome

    def let_next_begin(self, replica_id: int) -> None:
        """Gives the next one its turn, too: this replica will leave Python, or block, for long.

        Does nothing but under "staggered", and for those who are not the last to have got it.
        """
        if self._staggers and replica_id == self._latest and self._runnable:
            with self._mutex:
                self._start_more(1)

    def close(self) -> None:
        """Ends the threads and waits for that; idempotent. Not while a run is going on."""
        self.usable = False
        self._threads.close()

    def dismiss(self) -> None:
        """Has every thread end when it next waits for its turn, if it ever does."""
        self.usable = False
        self._threads.dismiss()

    # The turn, passed on by the thread that stops.

    def _stop(self, replica_id: int, point: MergePoint | None) -> bool:
        """Gives the turn away, at a merge point or for good; returns whether it came back."""
        with self._mutex:
            self._running.discard(replica_id)
            if point is not None:
                self._waiting[replica_id] = point
                self._frames[replica_id] = sys._getframe()
            self.pace.end_turn()
            if self._running:
                return False
            if not self._runnable:
                self._meet(replica_id)
            if not self._runnable:
                self._finished.open(near=self.takes_turns)
                return False
            return self._give_turns(replica_id)

    def _give_turns(self, mine: int | None = None) -> bool:
        """Gives the turn to whom it is due; returns whether to ``mine``, who need not be woken."""
        came_back = False
        while self._runnable:
            successor = self._next()
            if successor == mine:
                came_back = True
            else:
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

    def _meet(self, last: int) -> None:
        """Decides, once all have stopped, what happens, and who may go on."""
        waiting = self._waiting
        if self._failure.error is None and waiting:
            if len(waiting) < len(self._order) or are_unlike(waiting.values()):
                self._failure.error = divergence(self._tell_where())
            else:
                self._merge(last, dict(waiting))
        self._order = [last, *(r for r in reversed(self._order) if r != last)]
        self._runnable.extend(r for r in self._order if r in waiting)
        waiting.clear()
        self._frames.clear()

    def _merge(self, last: int, points: dict[int, MergePoint]) -> None:
        payloads = {r: points[r].payload for r in sorted(points)}
        action = points[min(points)].action
        # Everybody else stands still; the mutex is let go because the action may start a run of
        # its own (merge_call) and the caller looks in on us.
        self._running.add(last)  # whom an interrupt must reach
        self._mutex.release()
        self._acting = True
        try:
            self._results.update(self._act(action, payloads))
        except BaseException as error:
            self._results.update(dict.fromkeys(payloads, Raised(error)))
        finally:
            self._acting = False
            self._mutex.acquire()
            self._running.discard(last)

    # The threads.

    def _run_here(self) -> None:
        """Runs the replicas in the caller's thread, until one has to wait for another."""
        threads = self._threads
        try:
            threads.here = self._next()
            while threads.here is not None:
                ended = threads.here
                self._perform(ended)
                self._skip_the_unstarted()
                threads.here = self._next_here(ended)
        except BaseException as interrupt:  # struck our own code
            if threads.here is not None:
                self._running.discard(threads.here)
            self._abandon(interrupt)
            return
        if self._interrupted and self._failure.error is not None:
            self._abandon(self._failure.error)  # while another had the turn
        else:
            self._await()

    def _next_here(self, ended: int) -> int | None:
        """Ends a replica in the caller's thread; returns whom that thread can run next."""
        with self._mutex:
            if not self._waiting and self._runnable and self._runnable[0] in self._unstarted:
                self._running.discard(ended)
                self.pace.end_turn()
                return self._next()
        self._stop(ended, None)
        return None

    def _work(self, replica_id: int) -> None:
        with suppress(Released):  # sent by _abandon, it may arrive anywhere
            while self._threads.wait(replica_id):
                self._perform(replica_id)
                if self._threads.dismissed:
                    return
                self._skip_the_unstarted()
                self._stop(replica_id, None)

    def _perform(self, replica_id: int) -> None:
        try:
            self._results[replica_id] = self._tasks[replica_id]()
        except Released as released:
            self._failure.blame(released.__context__, replica_id)
        except BaseException as error:
            self._failure.note(error, replica_id)

    def _skip_the_unstarted(self) -> None:
        """Ends, in a run that has failed, those who have not begun."""
        if self._failure.error is not None:
            with self._mutex:
                self._runnable = deque(r for r in self._runnable if r not in self._unstarted)

    # The caller.

    def _await(self) -> None:
        """Waits until all replicas have ended; starts the next ones, watches the clock."""
        lookout = Lookout(self._limit, is_staggered=self._staggers)
        try:
            while not self._finished.wait(lookout.pause_seconds):
                running = tuple(self._running)
                begun = self._threads.begun(running)
                is_moving = self._acting or len(begun) < len(running)
                where = () if is_moving else lookout.where(begun)
                num_due = lookout.look(self._moves, where, len(self._runnable))
                if num_due:
                    with self._mutex:
                        self._start_more(num_due)
                if lookout.is_overdue:
                    self._abandon(timeout(self._limit, self._tell_where()))
                    return
        except BaseException as interrupt:
            self._abandon(interrupt)

    def _start_more(self, num_replicas: int) -> None:
        for _ in range(num_replicas):
            if self._runnable and self._running and self._failure.error is None:
                self._threads.wake(self._next(), near=False)

    def _abandon(self, failure: BaseException) -> None:
        """Fails the run from outside; threads that cannot be stopped are left to themselves."""
        abandoned, unwound = [self] if self.usable else [], set[threading.Thread]()
        for run in abandoned:  # grows
            # An asynchronous exception may strike our own code: never reuse these threads.
            run.usable, failed = False, failure if run is self else Released()
            run._failure.error, run._failure.replica_id = failed, None
            for thread in set(run._threads.begun(tuple(run._running))) - unwound:
                unwound.add(thread)
                raise_in(thread, Released)
                # It may wait for a run that it has started, and hear nothing before that ends.
                abandoned += callees_of(thread, Lockstep.run)
        try:
            is_late = isinstance(failure, CollectiveTimeoutError)
            if self._running and not self._finished.wait(0.2 if is_late else DRAIN_SECONDS):
                self.break_off()  # they may stand in wait for their devices
        finally:
            self.dismiss()

    def _tell_where(self) -> str:
        frames = self._frames | {r: frame_of(self._threads.of(r)) for r in self._running}
        names = {r: self.names[r] for r in self._tasks}
        return where_all_stand(names, self._waiting, frames, self._runnable)
