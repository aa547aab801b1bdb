"""ReplicaThreads: the threads of replicas, and the batons on which they wait for their turn.

Problem: the kernel wakes a sleeping thread on an idle CPU. That CPU takes 20 us or more to start
and has cold caches, so a step of small operations takes 1.5 times as long.
Rule: turns need only one CPU. A thread that passes its turn on, and is about to sleep, sets the
affinity of the next thread to its own CPU.
Consequence: the woken thread restores its affinity before it continues. Its computations, and the
threads it starts, may use every CPU as before.
"""

from __future__ import annotations

import ctypes
import math
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from time import monotonic
from typing import Any, Protocol

from mirror.base.mutex import Mutex, release_if_owned
from mirror.threads.merge_point import RunCancelled, Tasks
from mirror.threads.user_frames import active_calls_of, throw_into_thread

# A signal that arrives just before a thread sleeps does not wake it. That moment lasts up to a
# second without the GIL on a busy machine. So the caller of a run, which may be the main thread,
# wakes up this often: Python then handles the signal.
SIGNAL_SECONDS = 0.5
# An exception thrown into a thread is lost if it interrupts a finalizer or a callback: try again.
AGAIN_SECONDS = 0.5


class ReplicaThreads:
    """One thread per replica, started when first needed; one replica may use the caller's.

    Args:
        names: the replicas' names.
        work: the body of a replica's thread, called with the replica id; it returns once
            ``wait_for_run`` returns False.

    Attributes:
        caller: the thread that called ``run``.
        here: the replica that runs in the caller's thread, ``None`` if none does.
        dismissed: whether every thread ends when it next waits for its turn.
    """

    def __init__(self, names: Sequence[str], work: Callable[[int], None]) -> None:
        self.caller = threading.current_thread()
        self.here: int | None = None
        self.dismissed = False
        self._names, self._work = names, work
        self._turns, self._turn_here = [Baton() for _ in names], Baton(is_of_caller=True)
        self._threads: dict[int, threading.Thread] = {}

    def wake(self, replica_id: int, *, same_cpu: bool) -> None:
        """Wakes a replica that waits for its turn, in a new thread if it has none.

        Args:
            same_cpu: whether it continues on the CPU of the calling thread.
        """
        if replica_id not in self._threads and replica_id != self.here:
            self._start(replica_id)
        baton = self._turn_here if replica_id == self.here else self._turns[replica_id]
        baton.post(same_cpu=same_cpu)

    def wait_for_run(self, replica_id: int) -> bool:
        """Waits, in a replica's own thread, for its first turn in a run.

        Does not read ``here``: the next run may have set it already while this thread still
        finishes the last run.

        Returns:
            Whether there is a turn; False if dismissed.
        """
        return self._turns[replica_id].wait() and not self.dismissed

    def wait(self, replica_id: int, timeout: float = math.inf) -> bool:
        """Waits, inside a run, for a replica's next turn.

        Args:
            timeout: seconds.

        Returns:
            Whether it has the turn; False if dismissed, or after the timeout.
        """
        baton = self._turn_here if replica_id == self.here else self._turns[replica_id]
        return baton.wait(timeout) and not self.dismissed

    def threads_of(self, replica_id: int) -> threading.Thread:
        """Returns the thread of a replica."""
        return self.caller if replica_id == self.here else self._threads[replica_id]

    def started_threads(self, replica_ids: Iterable[int]) -> list[threading.Thread]:
        """Returns the threads of replicas, without threads that are still being started."""
        in_caller, caller = self.here, self.caller  # a snapshot: a run may change them meanwhile
        found = [caller if r == in_caller else self._threads.get(r) for r in replica_ids]
        return [thread for thread in found if thread is not None]

    def all(self) -> list[threading.Thread]:
        """Returns the threads that have been created."""
        return list(self._threads.values())

    def close(self) -> None:
        """Ends and joins the threads; idempotent. Must not be called during a run."""
        self.dismiss()
        for thread in self.all():
            if thread.is_alive():  # an interrupt may have kept it from starting
                thread.join()

    def dismiss(self) -> None:
        """Makes every replica, also one in the caller's thread, end at its next wait."""
        self.dismissed = True
        for baton in (self._turn_here, *(self._turns[r] for r in tuple(self._threads))):
            with suppress(RuntimeError):  # it is posted already
                baton.post(same_cpu=False)

    def move_back(self) -> None:
        """Restores the affinity of the caller's thread if an interrupt has prevented that."""
        self._turn_here.move_back()

    def _start(self, replica_id: int) -> None:
        name = f"mirror {self._names[replica_id]}"
        thread = threading.Thread(
            target=_serve, args=(self._work, replica_id), name=name, daemon=True
        )
        self._threads[replica_id] = thread
        try:
            thread.start()
        except RuntimeError as error:
            # start() waits on a Condition, which turns Ctrl-C into "release unlocked lock".
            if isinstance(error.__context__, KeyboardInterrupt):
                raise error.__context__ from None
            raise


_cancellable = set[int]()  # ids of the threads with work that can be cancelled
_cancelling = Mutex()


def _serve(work: Callable[[int], None], replica_id: int) -> None:
    """Does the work of a replica's thread, which may be cancelled."""
    ident, is_begun = threading.get_ident(), False
    while True:
        try:
            if not is_begun:
                is_begun = True
                _cancellable.add(ident)
                work(replica_id)
            _cancelling.call(_end_work, ident)
            return
        except RunCancelled:  # again, until it has left: no other exception comes then
            pass
        except BaseException:
            _cancellable.discard(ident)
            raise


def _end_work(ident: int) -> None:
    _cancellable.discard(ident)
    for _ in range(2):  # an exception that is on its way arrives here, where a loop jumps back
        pass


def cancel_thread(thread: threading.Thread) -> None:
    """Raises RunCancelled in the work of a replica's thread.

    Outside its work, where Python's own code begins and ends the thread, an exception would only
    be printed.
    """
    _cancelling.call(_cancel_work, thread)


def _cancel_work(thread: threading.Thread) -> None:
    if thread.ident in _cancellable:
        throw_into_thread(thread, RunCancelled)


class CancellableRun(Protocol):
    """A run of replicas: a ``Lockstep``."""

    def run(self, tasks: Tasks) -> dict[int, Any]:
        """Runs the tasks, in a replica's thread perhaps."""

    def fail(self, failure: BaseException) -> None:
        """Fails the run from outside: no replica continues past the next merge point."""

    def threads(self, *, which_run: bool) -> list[threading.Thread]:
        """Returns the live threads: of all replicas, or of those that have the turn."""


def cancel_and_join(run: CancellableRun, failure: BaseException, seconds: float) -> bool:
    """Fails a run, and the runs that its replicas have started, and joins all threads.

    Args:
        failure: the error of the run.
        seconds: how long to wait. Threads that have not ended by then are abandoned.

    Returns:
        Whether all threads have ended.
    """
    now = monotonic()
    deadline, again = now + seconds, now
    runs = [run]
    threads: set[threading.Thread] = set()
    sent = False
    while True:
        if monotonic() >= again:
            for one in runs:  # grows
                one.fail(failure if one is run else RunCancelled())
                threads.update(one.threads(which_run=False))
                for thread in one.threads(which_run=not sent):
                    if thread is not threading.current_thread():
                        # It may wait for a run inside, and gets no exception until that one ends.
                        runs += (
                            r for r in active_calls_of(thread, type(run).run) if r not in runs
                        )
                        cancel_thread(thread)
            sent, again = True, again + AGAIN_SECONDS
        alive = [t for t in threads if t.is_alive() and t is not threading.current_thread()]
        if not alive:
            return True
        now = monotonic()
        if now >= deadline:
            return False
        alive[0].join(min(again, deadline) - now)


class Baton:
    """Blocks one thread until another thread posts.

    Args:
        is_of_caller: whether the thread that waits may be the main thread, which handles signals.
    """

    __slots__ = ("_affinities", "_lock", "_longest", "_pinning", "_sleeper")

    def __init__(self, *, is_of_caller: bool = False) -> None:
        self._longest = SIGNAL_SECONDS if is_of_caller else -1.0  # seconds of one sleep
        self._lock, self._pinning = threading.Lock(), threading.RLock()
        self._lock.acquire()
        self._sleeper: int | None = None  # the native id of the waiting thread
        self._affinities: tuple[set[int], set[int]] | None = None  # pinned, original

    def wait(self, timeout: float = math.inf) -> bool:
        """Waits for a ``post`` and consumes it; returns whether it came within the timeout.

        Args:
            timeout: seconds.
        """
        # Not Thread.native_id: after a fork it still names the thread of the parent process.
        self._sleeper = threading.get_native_id()
        try:
            if timeout != math.inf:
                return self._lock.acquire(timeout=timeout)
            while not self._lock.acquire(timeout=self._longest):
                pass
            return True
        finally:
            try:
                with self._pinning:  # from here on no other thread changes this thread's affinity
                    self._sleeper = None
            except BaseException:
                release_if_owned(self._pinning)
                raise
            if self._affinities is not None:
                self.move_back()

    def renew(self) -> Callable[[], None]:
        """Forgets earlier posts, also those that threads are late to make with what this returns.

        Returns:
            A function that posts until the next call, and raises RuntimeError after a post.
        """
        lock = threading.Lock()
        lock.acquire()
        self._lock = lock
        return lock.release

    def post(self, *, same_cpu: bool) -> None:
        """Makes one thread continue.

        Args:
            same_cpu: whether it continues on the CPU of the calling thread.

        Raises:
            RuntimeError: the baton is posted already.
        """
        if same_cpu and _current_cpu is not None:
            try:
                with self._pinning:
                    if self._sleeper is not None:
                        own_cpu, allowed = {_current_cpu()}, os.sched_getaffinity(self._sleeper)
                        if own_cpu < allowed:
                            self._affinities = own_cpu, allowed
                            os.sched_setaffinity(self._sleeper, own_cpu)
            except OSError:  # the thread has ended
                pass
            except BaseException:
                release_if_owned(self._pinning)
                raise
        self._lock.release()

    def move_back(self) -> None:
        """Restores the affinity of the calling thread, which is the one that waits; idempotent.

        An affinity that the program has set in the meantime stays.
        """
        if self._affinities is not None:
            pinned, allowed = self._affinities
            if os.sched_getaffinity(0) == pinned:
                os.sched_setaffinity(0, allowed)
            self._affinities = None


def _cpu_finder() -> Callable[[], int] | None:
    """Returns libc's ``sched_getcpu``, or ``None`` if the platform has none."""
    if not hasattr(os, "sched_setaffinity"):
        return None
    try:
        find: Callable[[], int] = ctypes.PyDLL(None).sched_getcpu
    except (AttributeError, OSError):
        return None
    return find


_current_cpu = _cpu_finder()
