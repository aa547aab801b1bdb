"""Lockstep: one thread per replica; the replicas take turns between merge points.

``NullLockstep`` replaces it where one thread computes for all replicas.

[Note: Turns]
A replica keeps its turn until it returns or reaches a merge point; then the next replica gets it.
When all replicas wait at the same merge point, the last one to arrive runs its action once, for
all, and continues first. So N replicas pay N - 1 thread switches per merge:

    turn      0    1    2 | merge | 2    1    0 | merge | 0    1    2 | all returned
    thread    r0 > r1 > r2          r2 > r1 > r0          r0 > r1 > r2

    lockstep     the next replica starts when one stops; the first runs in the caller's thread
    staggered    the next one also starts while the running ones stall, see [Note: Standing still]
    concurrent   as lockstep, or all at once if turns are long; intra-op threads are shared
    parallel     all at once between merge points; intra-op threads are shared

Only the determinism of the simulation may rely on "one replica runs at a time".

[Note: Loose points]
At a loose point, the replicas that come meet without the rest. A merge there also waits until all
replicas have stopped. Then the waiting replica with the lowest id at any loose point meets all
replicas at the same point, and these continue; the rest keep waiting. One of those that met runs
the action, in its own context, also if another replica stopped last. So the clock does not decide
which replicas meet, and none waits forever.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from mirror.errors import CollectiveTimeoutError, StrategyError
from mirror.threads.cancellation import cancel_and_join
from mirror.threads.desync_report import timeout
from mirror.threads.merge_point import Act, MergeError, MergePoint, RunCancelled
from mirror.threads.replica_threads import ReplicaThreads
from mirror.threads.run_queue import RunQueue, Tasks
from mirror.threads.stall_detector import StallDetector
from mirror.threads.turn_timer import TurnTimer
from mirror.threads.user_frames import call_noted


class NullLockstep:
    """The lockstep of one replica's forward, recomputed by a backward pass outside ``run``."""

    takes_turns, is_eager, pace = True, False, TurnTimer()

    def let_next_begin(self, replica_id: int) -> None:
        """Does nothing: there is no next replica."""

    def check_going_on(self) -> None:
        """Does nothing: there is no other replica that could fail."""

    def merge(self, replica_id: int, point: MergePoint) -> object:
        """Raises StrategyError: one thread cannot wait for itself."""
        raise StrategyError(
            f"{point} cannot wait for the other replicas in a backward pass outside "
            "strategy.run, where one thread goes through all of them; call backward inside run, "
            "or keep it out of what activation checkpointing recomputes, and out of the backward "
            "of a custom function"
        )


# How long a run waits for its threads before it abandons them: after an interrupt, and after a
# timeout.
DRAIN_SECONDS, LATE_SECONDS = 5.0, 0.2


class Lockstep(RunQueue):
    """The threads of one group of replicas; runs one set of tasks at a time.

    Args:
        names: the replicas' names in messages, ``"replica 2 of 4 (cuda:2)"``.
        schedule: ``"lockstep"``, ``"staggered"``, ``"concurrent"`` or ``"parallel"``, see
            [Note: Turns].
        timeout_seconds: the run fails if no replica moves for so long; ``None``: no limit.

    Attributes:
        is_busy: whether it runs tasks. If an interrupt leaves it busy, it is not used again.
    """

    def __init__(
        self, names: tuple[str, ...], *, schedule: str, timeout_seconds: float | None
    ) -> None:
        super().__init__(names, ReplicaThreads(names, self._work), schedule=schedule)
        self.break_off: Callable[[], object] = bool  # ends waits for devices; set by the owner
        self._limit = math.inf if timeout_seconds is None else timeout_seconds
        self.is_busy = self._is_forked = False

    def run(
        self, tasks: Tasks, *, at_once: bool | None = None, act: Act | None = None
    ) -> dict[int, Any]:
        """Runs one task per replica id and returns their results by replica id.

        Args:
            at_once: ``True`` starts all replicas at once, ``False`` one after the other; ``None``
                decides by the length of their turns.
            act: runs the actions of merge points; ``None`` just calls them.

        Raises:
            DivergenceError: the replicas did not all reach the same merge points.
            CollectiveTimeoutError: no replica moved for ``timeout_seconds``.
            BaseException: the error of a task, with a note that names the replica.
        """
        self._begin_run(tasks, at_once, act)
        if len(tasks) == 1:
            replica_id, task = tasks.popitem()
            try:
                return {replica_id: call_noted(task, self.names[replica_id])}
            finally:
                self._begin_run({})
        self.is_busy = True  # until the end: an interrupt may come at any line
        try:
            self.pace.begin_turn()
            if self.takes_turns and self._limit == math.inf:
                self._run_here()
            else:
                with self._mutex:  # the first replicas may stop before all have got their turn
                    self._give_turns()
                self._await()
            if self._is_struck:
                self._cancel(self._failure.error)
        except BaseException as interrupt:  # it hit our own code
            self._cancel(interrupt)
            self._begin_run({})
            raise
        failure, results = self._failure, self._results
        self._begin_run({})  # drops the references to this run
        self.is_busy = False
        if failure.error is not None:
            failure.throw(self.names)
        return {replica_id: results[replica_id] for replica_id in tasks}

    def merge(self, replica_id: int, point: MergePoint) -> Any:
        """Blocks the calling replica at ``point`` until all arrive; returns its own result."""
        if len(self._order) < 2:
            return self._act(point.action, {replica_id: point.payload})[replica_id]
        if self._is_over():
            raise self._over()
        try:
            if not self._stop(replica_id, point):
                self._threads.wait(replica_id)
            if self._meeting and not self._is_over():  # it was woken to run the action
                meeting, self._meeting = self._meeting, ()
                self._meet(replica_id, meeting)
        except BaseException as error:  # an interrupt: this replica will not take its turn
            self._is_struck, self.usable = True, False
            self._failure.record(error, replica_id)
            raise
        if self._is_over():
            raise RunCancelled
        outcome = self._results.pop(replica_id)
        if isinstance(outcome, MergeError):
            raise outcome.error
        return outcome

    def check_going_on(self) -> None:
        """Raises in the calling replica if the run has failed, so that it waits for no other."""
        if self._is_over():
            raise self._over()

    def let_next_begin(self, replica_id: int) -> None:
        """Starts the next replica, because this one will leave Python, or block, for long.

        Applies only under "staggered", and only to the replica that got its turn last.
        """
        if self._staggers and replica_id == self._latest and self._runnable:
            with self._mutex:
                self._start_more(1)

    def _is_over(self) -> bool:
        return self._failure.error is not None or self._threads.dismissed

    def _over(self) -> BaseException:
        """Returns the exception for a replica that would wait for others in a run that is over."""
        if self._is_forked:
            return StrategyError(
                "this process was forked inside run, and the other replicas are not in it: let "
                "it do what takes no strategy, as the workers of a DataLoader do"
            )
        return RunCancelled()

    def abandon_threads(self) -> None:
        """Drops the threads in a forked process: they exist only in the parent."""
        self.usable, self._is_forked, self._threads.dismissed = False, True, True

    def close(self) -> None:
        """Ends and joins the threads; idempotent. Must not be called during a run."""
        self.usable = False
        self._threads.close()

    # The threads.

    def _run_here(self) -> None:
        """Runs the replicas in the caller's thread until one has to wait for another one."""
        threads = self._threads
        threads.here = self._next()
        while threads.here is not None:
            ended = threads.here
            self._perform(ended)
            if self._is_struck:
                return
            self._skip_the_unstarted()
            threads.here = self._next_here(ended)
        self._await()

    def _next_here(self, ended: int) -> int | None:
        """Ends a replica in the caller's thread; returns the replica that thread can run next."""
        with self._mutex:
            if not self._waiting and self._runnable and self._runnable[0] in self._unstarted:
                self._running.discard(ended)
                self.pace.end_turn()
                return self._next()
        self._stop(ended, None)
        return None

    def _work(self, replica_id: int) -> None:
        try:
            while self._threads.wait_for_run(replica_id):
                self._perform(replica_id)
                if self._threads.dismissed:
                    return
                self._skip_the_unstarted()
                self._stop(replica_id, None)
        except RunCancelled:  # thrown by cancel_and_join; it may arrive at any line
            return
        except BaseException as error:  # this thread ends, with or without the turn
            self._is_struck, self.usable = True, False
            self._failure.record(error, replica_id)
            self._wake_all()

    def _perform(self, replica_id: int) -> None:
        try:
            self._results[replica_id] = self._tasks[replica_id]()
        except RunCancelled as released:
            self._failure.blame(released.__context__, replica_id)
        except BaseException as error:
            self._failure.record(error, replica_id)

    def _skip_the_unstarted(self) -> None:
        """Removes the replicas that have not started from a run that has failed."""
        if self._failure.error is not None:
            with self._mutex:
                self._runnable = deque(r for r in self._runnable if r not in self._unstarted)

    # The caller.

    def _await(self) -> None:
        """Waits until all replicas have ended; starts stalled successors and checks the limit."""
        detector = StallDetector(self._limit, is_staggered=self._staggers)
        while not self._finished.wait(detector.pause_seconds):
            running = tuple(self._running)
            begun = self._threads.begun(running)
            is_moving = self._acting or len(begun) < len(running)
            where = () if is_moving else detector.where(begun)
            num_due = detector.poll(self._moves, where, len(self._runnable))
            if num_due:
                with self._mutex:
                    self._start_more(num_due)
            if detector.is_overdue:
                self._is_struck = True
                self._failure.record(timeout(self._limit, self._tell_where()), None)
                return

    def _start_more(self, num_replicas: int) -> None:
        for _ in range(num_replicas):
            if self._runnable and self._running and self._failure.error is None:
                self._threads.wake(self._next(), near=False)

    def _cancel(self, failure: BaseException | None) -> None:
        """Cancels a run that an exception has hit and ends its threads for good; idempotent."""
        assert failure is not None
        is_late = isinstance(failure, CollectiveTimeoutError)
        try:
            seconds = LATE_SECONDS if is_late else DRAIN_SECONDS
            if not cancel_and_join(self, failure, seconds, inner=Lockstep.run):
                self.break_off()  # the threads may wait for their devices
        finally:
            self._finished.move_back()
            self._threads.move_back()

    def fail(self, failure: BaseException) -> None:
        """Fails the run from outside: no replica continues past the next merge point."""
        # An asynchronous exception may hit our own code: never reuse these threads.
        self._is_struck, self.usable = True, False
        if self._failure.error is not failure:
            self._failure.error, self._failure.replica_id = failure, None
        self._wake_all()

    def threads(self, *, which_run: bool) -> list[threading.Thread]:
        """Returns the live threads: of all replicas, or of those that have the turn."""
        mine = self._threads.begun(tuple(self._running)) if which_run else self._threads.all()
        return [thread for thread in mine if thread.is_alive()]
