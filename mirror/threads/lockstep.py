"""NullLockstep: stands for the lockstep where one thread computes for all replicas.

Lockstep: one thread per replica, and they take turns between merge points.

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

What may be changed in these without a change of what the program does, "auto" and "staggered"
choose by the clock: [Note: Measured manners] in ``schedules/manners.py``.

So nothing but the determinism of the simulation may rest on "only one runs".

Because everybody's state is known here, divergence is seen, not suffered: when all have stopped
and they do not stand at one point, the run fails with the line where each stands.

[Note: Loose points]
At a loose point those who come meet without those who do not. It waits, too, until all have
stopped: then those who stand at one such point, with the replica of the lowest number that stands
at any, meet and go on, and the others stand where they are. One of those who met acts, in its own
context, whoever has stopped last. So who meets whom does not depend on the clock, and nobody waits
at it in vain.
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
    """The lockstep of what a backward pass outside ``run`` recomputes of one replica's part."""

    takes_turns, is_eager, pace = True, False, TurnTimer()

    def let_next_begin(self, replica_id: int) -> None:
        """Does nothing: there is no next one."""

    def check_going_on(self) -> None:
        """Does nothing: there is no other one that could fail."""

    def merge(self, replica_id: int, point: MergePoint) -> object:
        """Refuses: nobody can wait here."""
        raise StrategyError(
            f"{point} cannot wait for the other replicas in a backward pass outside "
            "strategy.run, where one thread goes through all of them; call backward inside run, "
            "or keep it out of what activation checkpointing recomputes, and out of the backward "
            "of a custom function"
        )


# How long an interrupted run waits for its threads before it leaves them to themselves, and one
# whose replicas do not move.
DRAIN_SECONDS, LATE_SECONDS = 5.0, 0.2


class Lockstep(RunQueue):
    """The threads of one group of replicas; runs one set of tasks at a time.

    Args:
        names: how messages call the replicas, ``"replica 2 of 4 (cuda:2)"``.
        schedule: ``"lockstep"``, ``"staggered"`` or ``"concurrent"``, see [Note: Turns].
        timeout_seconds: how long no replica may move before the run fails; ``None``: for ever.

    Attributes:
        is_busy: whether it runs tasks. One that an interrupt has left so is not used again.
    """

    def __init__(
        self, names: tuple[str, ...], *, schedule: str, timeout_seconds: float | None
    ) -> None:
        super().__init__(names, ReplicaThreads(names, self._work), schedule=schedule)
        self.break_off: Callable[[], object] = bool  # ends the waits of devices, by whoever set it
        self._limit = math.inf if timeout_seconds is None else timeout_seconds
        self.is_busy = self._is_forked = False

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
        self.is_busy = True  # until the end: an interrupt may come anywhere
        try:
            self.pace.begin_turn()
            if self.takes_turns and self._limit == math.inf:
                self._run_here()
            else:
                with self._mutex:  # the first ones may stop before all have been given their turn
                    self._give_turns()
                self._await()
            if self._is_struck:
                self._cancel(self._failure.error)
        except BaseException as interrupt:  # struck our own code
            self._cancel(interrupt)
            self._begin_run({})
            raise
        failure, results = self._failure, self._results
        self._begin_run({})  # keeps nothing of this run alive
        self.is_busy = False
        if failure.error is not None:
            failure.throw(self.names)
        return {replica_id: results[replica_id] for replica_id in tasks}

    def merge(self, replica_id: int, point: MergePoint) -> Any:
        """Stops the calling replica at ``point`` until all have reached it; returns its result."""
        if len(self._order) < 2:
            return self._act(point.action, {replica_id: point.payload})[replica_id]
        if self._is_over():
            raise self._over()
        try:
            if not self._stop(replica_id, point):
                self._threads.wait(replica_id)
            if self._meeting and not self._is_over():  # it was woken to act for those who met
                met, self._meeting = self._meeting, ()
                self._meet(replica_id, met)
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
        """Unwinds the calling replica if the run has failed elsewhere: nobody waits in vain."""
        if self._is_over():
            raise self._over()

    def let_next_begin(self, replica_id: int) -> None:
        """Gives the next one its turn, too: this replica will leave Python, or block, for long.

        Does nothing but under "staggered", and for those who are not the last to have got it.
        """
        if self._staggers and replica_id == self._latest and self._runnable:
            with self._mutex:
                self._start_more(1)

    def _is_over(self) -> bool:
        return self._failure.error is not None or self._threads.dismissed

    def _over(self) -> BaseException:
        """Returns what a replica is told that wants to wait for others in vain."""
        if self._is_forked:
            return StrategyError(
                "this process was forked inside run, and the other replicas are not in it: let "
                "it do what takes no strategy, as the workers of a DataLoader do"
            )
        return RunCancelled()

    def abandon_threads(self) -> None:
        """Forgets, in a forked process, the threads, which are in the other one."""
        self.usable, self._is_forked, self._threads.dismissed = False, True, True

    def close(self) -> None:
        """Ends the threads and waits for that; idempotent. Not while a run is going on."""
        self.usable = False
        self._threads.close()

    # The threads.

    def _run_here(self) -> None:
        """Runs the replicas in the caller's thread, until one has to wait for another."""
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
        """Ends a replica in the caller's thread; returns whom that thread can run next."""
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
        except RunCancelled:  # sent by _abandon, it may arrive anywhere
            return
        except BaseException as error:  # this thread ends, whoever's turn it is
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
        """Ends, in a run that has failed, those who have not begun."""
        if self._failure.error is not None:
            with self._mutex:
                self._runnable = deque(r for r in self._runnable if r not in self._unstarted)

    # The caller.

    def _await(self) -> None:
        """Waits until all replicas have ended; starts the next ones, watches the clock."""
        lookout = StallDetector(self._limit, is_staggered=self._staggers)
        while not self._finished.wait(lookout.pause_seconds):
            running = tuple(self._running)
            begun = self._threads.begun(running)
            is_moving = self._acting or len(begun) < len(running)
            where = () if is_moving else lookout.where(begun)
            num_due = lookout.poll(self._moves, where, len(self._runnable))
            if num_due:
                with self._mutex:
                    self._start_more(num_due)
            if lookout.is_overdue:
                self._is_struck = True
                self._failure.record(timeout(self._limit, self._tell_where()), None)
                return

    def _start_more(self, num_replicas: int) -> None:
        for _ in range(num_replicas):
            if self._runnable and self._running and self._failure.error is None:
                self._threads.wake(self._next(), near=False)

    def _cancel(self, failure: BaseException | None) -> None:
        """Ends a run that was struck, and its threads, once and for all; idempotent."""
        assert failure is not None
        is_late = isinstance(failure, CollectiveTimeoutError)
        try:
            seconds = LATE_SECONDS if is_late else DRAIN_SECONDS
            if not cancel_and_join(self, failure, seconds, inner=Lockstep.run):
                self.break_off()  # they may stand in wait for their devices
        finally:
            self._finished.move_back()
            self._threads.move_back()

    def fail(self, failure: BaseException) -> None:
        """Fails the run from outside: no replica goes on past the next merge point."""
        # An asynchronous exception may strike our own code: never reuse these threads.
        self._is_struck, self.usable = True, False
        if self._failure.error is not failure:
            self._failure.error, self._failure.replica_id = failure, None
        self._wake_all()

    def threads(self, *, which_run: bool) -> list[threading.Thread]:
        """Returns the replicas' threads that live, or those of replicas that have the turn."""
        mine = self._threads.begun(tuple(self._running)) if which_run else self._threads.all()
        return [thread for thread in mine if thread.is_alive()]
