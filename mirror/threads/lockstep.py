"""Lockstep: one thread per replica; the replicas take turns between merge points.

``RunQueue`` in ``merge_point.py`` is plain data: which replicas of a run move, which wait, and
which gets the next turn. ``Lockstep`` starts and wakes the threads, and runs the actions of merge
points. ``NullLockstep`` replaces it where one thread computes for all replicas.

[Note: Turns]
A replica keeps its turn until it returns or reaches a merge point; then the next replica gets it.
When all replicas wait at the same merge point, the last one to arrive runs its action once, for
all, and continues first. So N replicas pay N - 1 thread switches per merge:

    turn      0    1    2 | merge | 2    1    0 | merge | 0    1    2 | all returned
    thread    r0 > r1 > r2          r2 > r1 > r0          r0 > r1 > r2

    lockstep     the next replica starts when one stops; the first runs in the caller's thread
    staggered    the next one also starts when one leaves Python, or stalls: [Note: Staggered]
    concurrent   as lockstep, or all at once if turns are long; intra-op threads are shared
    parallel     all at once between merge points; intra-op threads are shared

Where all start at once, the first one also runs in the caller's thread: one thread less to wake.

A replica that is about to change what the process has once calls ``take_turns``: it waits until
the others have stopped, and from there on this run moves in turns.

Only the determinism of the simulation may rely on "one replica runs at a time".

[Note: Staggered]
Problem: threads that execute Python at once hand the interpreter over at every launch, which takes
longer than the launch. But a GPU should not wait while a replica is in a backward pass, which
launches without Python.
Rule: one replica executes Python at a time. It lets the next one begin before a long call without
Python, and goes on after that call when it has the turn: behind all that wait already. Threads
that launch on one GPU wait for each other in its driver, so replicas that share it do not overlap:

    cuda:0    r0 forward | backward             |            wait | step
    cuda:1               | r1 forward           | backward               | step

``StallDetector`` sees a replica that blocks, on its device, on a lock or on another replica. The
others then start in its place, also on its own GPU.

[Note: Partial merge points]
At a partial merge point, the replicas that come meet without the rest. A merge there also waits
until all replicas have stopped. Then the waiting replica with the lowest id at any such point
meets all replicas at the same point, and these continue; the rest keep waiting. One of those that
met runs the action, in its own context, also if another replica stopped last. So the clock does
not decide which replicas meet, and none waits forever.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import monotonic
from typing import Any

from mirror.base.mutex import release_if_owned
from mirror.device.host import release_thread_pool
from mirror.errors import CollectiveTimeoutError, StrategyError
from mirror.threads.merge_point import (
    Act,
    Failure,
    MergeError,
    MergePoint,
    RunCancelled,
    RunQueue,
    Tasks,
    act_directly,
    describe_all,
    divergence,
    timeout,
)
from mirror.threads.replica_threads import (
    SIGNAL_SECONDS,
    Baton,
    ReplicaThreads,
    cancel_and_join,
)
from mirror.threads.schedule import StallDetector, TurnTimer
from mirror.threads.user_frames import call_with_note, frame_of, positions

# How long a run waits for its threads before it abandons them: after an interrupt, and after a
# timeout.
DRAIN_SECONDS, LATE_SECONDS = 5.0, 0.2
# How long all running replicas may be in long calls until one that shares their GPU starts.
LONG_CALL_SECONDS = 0.1
# How long a replica that holds locks, perhaps, waits for others that do not move. They may be in
# an operation that takes long on a CPU.
BLOCKED_SECONDS = 60.0


class Lockstep:
    """The threads of one group of replicas; runs one set of tasks at a time.

    Args:
        names: the replicas' names in messages, ``"replica 2 of 4 (cuda:2)"``.
        schedule: ``"lockstep"``, ``"staggered"``, ``"concurrent"`` or ``"parallel"``, see
            [Note: Turns].
        timeout_seconds: the run fails if no replica moves for so long; ``None``: no limit.

    Attributes:
        pace: measures whether turns are long, under ``"concurrent"``.
        takes_turns: whether the replicas of this run move one at a time.
        starts_at_once: whether the replicas of the next run start at once by default.
        is_eager: whether they all start at once in this run.
        ends_teams: whether a thread that passes its turn on ends its OpenMP team. See
            ``host.py``.
        is_busy: whether it runs tasks. If an interrupt leaves it busy, it is not used again.
        usable: whether another run is possible; False once closed, or hit by an exception.
    """

    def __init__(
        self, names: tuple[str, ...], *, schedule: str, timeout_seconds: float | None
    ) -> None:
        self.names, self._schedule = names, schedule
        self._limit = math.inf if timeout_seconds is None else timeout_seconds
        # Set by the owner: ``abort`` ends waits for devices; ``on_error`` is called when a replica
        # has raised an error, before the run waits for the other replicas; ``devices`` of each
        # replica: those with equal ones overlap only if they stall.
        self.devices: Sequence[object] = names
        self.abort: Callable[[], object] = bool
        self.on_error: Callable[[], object] = bool
        self.pace, self.ends_teams = TurnTimer(), False
        # _is_broken: an exception has hit our own code, so the state of the turns is unknown.
        self.usable, self._is_broken = True, False
        self.is_busy = self._is_forked = False
        self._threads = ReplicaThreads(names, self._work)
        self._mutex, self._finished = threading.RLock(), Baton(is_of_caller=True)
        self._finish: Callable[[], object] = bool  # posts it, in this run only
        self._begin_run({})

    def _begin_run(
        self, tasks: Tasks, at_once: bool | None = None, act: Act | None = None
    ) -> None:
        """Sets the state of a new run; without tasks, drops the references to the last one."""
        self._tasks, self._act = tasks, act or act_directly
        self._threads.caller, self._threads.here = threading.current_thread(), None
        self._queue, self._failure, self._results = RunQueue(tasks), Failure(), dict[int, Any]()
        self._meeting: tuple[int, ...] = ()  # the first of them runs the action for all of them
        self._acting = False  # whether a merge's action runs; it has no deadline
        by_pace = self._schedule == "concurrent" and self.pace.is_long
        self.starts_at_once = by_pace or self._schedule == "parallel"
        self.is_eager = self.starts_at_once if at_once is None else at_once
        self._staggers = self._schedule == "staggered" and at_once is not False
        self.takes_turns = not (self._staggers or self.is_eager)
        self._wakes_all = self.is_eager

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
                return {replica_id: call_with_note(task, self.names[replica_id])}
            finally:
                self._begin_run({})
        self.is_busy = True  # until the end: an interrupt may come at any line
        self._finish = self._finished.renew()
        try:
            if self._schedule == "concurrent":
                self.pace.begin_turn()
            if not self._staggers and self._limit == math.inf:
                self._run_here()
            else:
                with self._mutex:  # the first replicas may stop before all have got their turn
                    self._give_turns()
                self._await()
            if self._is_broken:
                self._cancel(self._failure.error)
        except BaseException as interrupt:  # it hit our own code
            release_if_owned(self._mutex)
            self._cancel(interrupt)
            self._begin_run({})
            raise
        failure, results = self._failure, self._results
        self._begin_run({})  # drops the references to this run
        self.is_busy = False
        if failure.error is not None:
            failure.throw(self.names)
        return dict(zip(tasks, map(results.__getitem__, tasks), strict=True))

    # Merge points

    def merge(self, replica_id: int, point: MergePoint) -> Any:
        """Blocks the calling replica at ``point`` until all arrive; returns its own result."""
        if len(self._queue.order) < 2:
            return self._act(point.action, {replica_id: point.payload})[replica_id]
        failure, threads = self._failure, self._threads
        if failure.error is not None or threads.dismissed:
            raise self._run_over_error()
        try:
            if not self._stop(replica_id, point):
                threads.wait(replica_id)
            if self._meeting and not self._is_over():  # it was woken to run the action
                meeting, self._meeting = self._meeting, ()
                self._meet(replica_id, meeting)
        except BaseException as error:
            self._leave_broken(replica_id, error)
            raise
        if failure.error is not None or threads.dismissed:
            raise RunCancelled
        outcome = self._results.pop(replica_id)
        if isinstance(outcome, MergeError):
            raise outcome.error
        return outcome

    def _stop(self, replica_id: int, point: MergePoint | None) -> bool:
        """Passes the turn on, at a merge point or at the end; returns whether it came back."""
        queue = self._queue
        with self._mutex:
            queue.running.discard(replica_id)
            if point is not None:
                queue.waiting[replica_id] = point
                queue.frames[replica_id] = sys._getframe()
            elif replica_id in queue.away:
                queue.away.remove(replica_id)
            if replica_id in queue.stalled:
                queue.stalled.remove(replica_id)
            if self._schedule == "concurrent":
                self.pace.end_turn()
            if self._is_broken:
                self._wake_all()
                return False
            if queue.running and (not self._staggers or queue.in_python()):
                return False
            if queue.runnable:
                return self._give_turns(replica_id)
            if queue.running:
                return False
            meeting: tuple[int, ...] = ()
            if self._failure.error is None and queue.waiting:
                meeting = queue.find_meeting()
                if not meeting:
                    self._failure.error = divergence(self._describe_replicas())
            if not meeting:
                return self._go_on(replica_id, tuple(queue.waiting))
            if replica_id not in meeting:
                self._meeting = meeting
                queue.runnable.append(meeting[0])
                return self._give_turns(replica_id)
            queue.running.add(replica_id)  # so that an interrupt reaches it
        return self._meet(replica_id, meeting)

    def _meet(self, replica_id: int, meeting: tuple[int, ...]) -> bool:
        """Runs the action for the meeting replicas; returns whether this one may continue.

        Does not hold the mutex meanwhile: the action may start a run of its own (merge_call), and
        the caller polls the queue.
        """
        points, payloads = self._queue.waiting, dict[int, Any]()
        for r in meeting:
            payloads[r] = points[r].payload
        try:
            self._acting = True
            self._results.update(self._act(points[meeting[0]].action, payloads))
        except BaseException as error:  # it goes to all replicas that met
            self._results.update(dict.fromkeys(payloads, MergeError(error)))
        finally:
            self._acting = False
        with self._mutex:
            self._queue.running.discard(replica_id)
            return self._go_on(replica_id, meeting)

    def _go_on(self, last: int, meeting: tuple[int, ...]) -> bool:
        """Makes the replicas that met runnable; returns whether ``last`` may continue."""
        self._queue.release(last, meeting)
        if self._queue.runnable:
            return self._give_turns(last)
        if self.ends_teams and last != self._threads.here:  # else the caller has this thread
            self._end_team()
        self._finished.post(same_cpu=self.takes_turns)
        return False

    def _give_turns(self, mine: int | None = None) -> bool:
        """Wakes the next replicas; returns whether ``mine`` is one, which needs no waking."""
        queue, came_back = self._queue, False
        while queue.runnable:
            if self._staggers and not queue.move_up(self.devices) and queue.running:
                break
            successor = queue.next()
            if successor == mine:
                came_back = True
            else:
                if self.ends_teams:
                    self._end_team()
                self._threads.wake(successor, same_cpu=self.takes_turns)
            if not self._wakes_all and successor not in queue.away:
                break
        return came_back

    def take_turns(self, replica_id: int) -> bool:
        """Makes the replicas of this run move one at a time; waits for the calling one's turn.

        Those that run at once go on to their next stop. ``takes_turns`` and ``is_eager`` stay: by
        them all replicas have chosen, or will choose, how to step.

        Returns:
            Whether it has the turn. Otherwise the others have not moved for ``BLOCKED_SECONDS``:
            they may wait for a lock that the calling replica holds, so it must not wait on.
        """
        if self.takes_turns:
            return True
        queue = self._queue
        try:
            with self._mutex:
                self._staggers = self._wakes_all = False
                queue.away.clear()
                for returning in tuple(queue.returning):  # they run at once with the others
                    queue.runnable.remove(returning)
                    queue.runnable.appendleft(returning)
                    self._threads.wake(queue.next(), same_cpu=False)
                if len(queue.running) == 1:
                    return True
                queue.running.discard(replica_id)
                queue.runnable.append(replica_id)
            has_turn = self._wait_while_others_move(replica_id)
        except BaseException as error:
            self._leave_broken(replica_id, error)
            raise
        if self._is_over():
            raise RunCancelled
        return has_turn

    def _wait_while_others_move(self, replica_id: int) -> bool:
        queue, before, since = self._queue, (0, list[object]()), monotonic()
        while not self._threads.wait(replica_id, min(SIGNAL_SECONDS, BLOCKED_SECONDS)):
            if self._threads.dismissed:
                return False
            running = self._threads.started_threads(tuple(queue.running))
            now = queue.num_turns, list[object](positions(running))
            if now != before or self._acting:
                before, since = now, monotonic()
            elif monotonic() - since >= BLOCKED_SECONDS:
                with self._mutex:
                    if replica_id in queue.runnable:  # else it gets its turn at this moment
                        queue.runnable.remove(replica_id)
                        queue.running.add(replica_id)
                        return False
        return True

    def _leave_broken(self, replica_id: int, error: BaseException) -> None:
        """Handles an interrupt of a replica that waited: it will not take its turn."""
        release_if_owned(self._mutex)
        self._is_broken, self.usable = True, False
        self._failure.record(error, replica_id)

    def check_going_on(self) -> None:
        """Raises in the calling replica if the run has failed, so that it waits for no other."""
        if self._is_over():
            raise self._run_over_error()

    def let_next_begin(self, replica_id: int) -> bool:
        """Passes the turn on, because this replica will leave Python, or block, for long.

        Applies only under "staggered". See [Note: Staggered].

        Returns:
            Whether ``wait_for_turn`` is due after the long call. False inside another long call.
        """
        queue = self._queue
        if self.takes_turns or replica_id in queue.away or replica_id not in queue.running:
            return False
        try:
            with self._mutex:
                if not self._staggers:
                    return False
                queue.away.append(replica_id)
                if replica_id in queue.stalled:
                    queue.stalled.remove(replica_id)
                if queue.runnable and not queue.in_python():
                    self._give_turns()
        except BaseException as error:
            self._leave_broken(replica_id, error)
            raise
        return True

    def wait_for_turn(self, replica_id: int) -> None:
        """Waits, after a long call, until no other replica executes Python.

        Raises:
            RunCancelled: the run has failed.
        """
        queue = self._queue
        try:
            with self._mutex:
                if replica_id not in queue.away:  # ``take_turns`` lets it go on
                    return
                queue.away.remove(replica_id)
                if self._failure.error is not None or queue.in_python() == [replica_id]:
                    return
                queue.running.discard(replica_id)
                queue.runnable.append(replica_id)
                queue.returning.append(replica_id)
            self._threads.wait(replica_id)
        except BaseException as error:
            self._leave_broken(replica_id, error)
            raise
        if self._is_over():
            raise RunCancelled

    def _is_over(self) -> bool:
        return self._failure.error is not None or self._threads.dismissed

    def _run_over_error(self) -> BaseException:
        """Returns the exception for a replica that would wait for others in a run that is over."""
        if self._is_forked:
            return StrategyError(
                "this process was forked inside run, and the other replicas are not in it: let "
                "it do what takes no strategy, as the workers of a DataLoader do"
            )
        return RunCancelled()

    # The replicas' threads, and replicas in the caller's thread

    def _run_here(self) -> None:
        """Runs the first replica in the caller's thread; the others, too, until one has to wait.

        If replicas start at once, it runs only the first one.
        """
        queue, threads = self._queue, self._threads
        threads.here = ended = queue.next()
        if self.is_eager:
            with self._mutex:  # the others may stop before all have started
                self._give_turns()
        while True:
            self._perform(ended)
            if self._is_broken:
                return
            with self._mutex:
                if self._failure.error is not None:
                    queue.drop_unstarted()
                if self.is_eager or queue.waiting or not queue.runnable:
                    break
                if queue.runnable[0] not in queue.unstarted:
                    break
                queue.running.discard(ended)
                if self._schedule == "concurrent":
                    self.pace.end_turn()
                threads.here = ended = queue.next()
        if self.is_eager or queue.waiting or queue.runnable:
            self._stop(ended, None)
            self._await()

    def _work(self, replica_id: int) -> None:
        run: tuple[RunQueue, Failure, Callable[[], object]] | None = None
        while True:
            try:
                while self._threads.wait_for_run(replica_id):
                    run = self._queue, self._failure, self._finish
                    self._perform(replica_id)
                    if self._threads.dismissed:
                        return
                    if self._failure.error is not None:
                        with self._mutex:
                            self._queue.drop_unstarted()
                    self._stop(replica_id, None)
                    run = None
                return
            except RunCancelled:  # thrown by cancel_and_join; it may arrive at any line
                release_if_owned(self._mutex)
                return
            except BaseException as error:
                release_if_owned(self._mutex)
                if run is None or not run[0].is_over:
                    # This thread ends, with or without the turn.
                    self._is_broken, self.usable = True, False
                    self._failure.record(error, replica_id)
                    self._wake_all()
                    return
                # All replicas have ended. The caller may have begun another run already.
                _, failure, finish = run
                failure.record(error, replica_id)
                with suppress(RuntimeError):  # it is posted already
                    finish()
                run = None

    def _perform(self, replica_id: int) -> None:
        try:
            self._results[replica_id] = self._tasks[replica_id]()
        except RunCancelled as released:
            release_if_owned(self._mutex)
            self._failure.blame(released.__context__, replica_id)
        except BaseException as error:
            release_if_owned(self._mutex)
            self._failure.record(error, replica_id)
            self.on_error()

    def _end_team(self) -> None:
        if self.takes_turns and release_thread_pool is not None:
            release_thread_pool()

    def _wake_all(self) -> None:
        """Wakes all waiting threads, the caller included: the run is over."""
        self.dismiss()
        with suppress(RuntimeError):  # it is posted already
            self._finished.post(same_cpu=False)

    # The caller

    def _await(self) -> None:
        """Waits until all replicas have ended; starts stalled successors and checks the limit."""
        if self._limit == math.inf and not self._staggers:
            self._finished.wait()
            return
        queue, detector = self._queue, StallDetector(self._limit, is_staggered=self._staggers)
        last_in_python = monotonic()
        while not self._finished.wait(min(detector.pause_seconds, SIGNAL_SECONDS)):
            in_python = queue.in_python()
            running = tuple(in_python or queue.running)
            begun = self._threads.started_threads(running)
            is_moving = self._acting or len(begun) < len(running)
            if in_python or not queue.runnable:
                last_in_python = monotonic()
            elif monotonic() - last_in_python < LONG_CALL_SECONDS:
                is_moving = True
            where = () if is_moving else detector.sample_positions(begun)
            num_due = detector.poll(queue.num_turns, where, len(queue.runnable))
            if num_due:
                with self._mutex:
                    self._start_more(num_due)
            if detector.is_overdue:
                self._is_broken = True
                self._failure.record(timeout(self._limit, self._describe_replicas()), None)
                return

    def _start_more(self, num_replicas: int) -> None:
        """Starts the next replicas in the place of those that stall."""
        queue = self._queue
        if not self._staggers or not queue.running:  # since a moment ago: ``take_turns``
            return
        if self._failure.error is not None:
            queue.drop_unstarted()
        queue.stalled += queue.in_python()
        for _ in range(min(num_replicas, len(queue.runnable))):
            self._threads.wake(queue.next(), same_cpu=False)

    def _describe_replicas(self) -> str:
        """Returns one line per replica with its position."""
        queue = self._queue
        frames = queue.frames | {r: frame_of(self._threads.threads_of(r)) for r in queue.running}
        names = {r: self.names[r] for r in self._tasks}
        return describe_all(names, queue.waiting, frames, queue.runnable)

    def _cancel(self, failure: BaseException | None) -> None:
        """Cancels a run that an exception has hit and ends its threads for good; idempotent."""
        assert failure is not None
        is_late = isinstance(failure, CollectiveTimeoutError)
        try:
            seconds = LATE_SECONDS if is_late else DRAIN_SECONDS
            if not cancel_and_join(self, failure, seconds):
                self.abort()  # the threads may wait for their devices
        finally:
            self._finished.move_back()
            self._threads.move_back()

    def fail(self, failure: BaseException) -> None:
        """Fails the run from outside: no replica continues past the next merge point."""
        # An asynchronous exception may hit our own code: never reuse these threads.
        self._is_broken, self.usable = True, False
        if self._failure.error is not failure:
            self._failure.error, self._failure.replica_id = failure, None
        self._wake_all()

    def threads(self, *, which_run: bool) -> list[threading.Thread]:
        """Returns the live threads: of all replicas, or of those that have the turn."""
        running = tuple(self._queue.running)
        mine = self._threads.started_threads(running) if which_run else self._threads.all()
        return [thread for thread in mine if thread.is_alive()]

    # The end of the threads

    def dismiss(self) -> None:
        """Makes every thread end when it next waits for its turn."""
        self.usable = False
        self._threads.dismiss()

    def close(self) -> None:
        """Ends and joins the threads; idempotent. Must not be called during a run."""
        self.usable = False
        self._threads.close()

    def abandon_threads(self) -> None:
        """Drops the threads in a forked process: they exist only in the parent."""
        self.usable, self._is_forked, self._threads.dismissed = False, True, True
