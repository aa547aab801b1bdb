"""Locks that CPython loses, and exceptions that hit a thread outside its work.

CPython 3.14 may raise KeyboardInterrupt between ``__enter__`` of a lock and the body of its
``with`` statement. ``LosingLock`` does that in every version, in any thread.
"""

import threading
from contextlib import contextmanager

import pytest

from mirror.threads import lockstep as lockstep_module
from mirror.threads import replica_threads
from mirror.threads.lockstep import Lockstep
from mirror.threads.merge_point import MergePoint, RunCancelled
from mirror.threads.replica_threads import Baton, ReplicaThreads, cancel_thread
from mirror.threads.user_frames import throw_into_thread

N = 3
SCHEDULES = ["lockstep", "staggered", "parallel"]


class LosingLock:
    """An RLock; the ``nth`` ``with`` statement has it, and is hit before its body begins."""

    def __init__(self, nth):
        self.nth, self.num_entered = nth, 0
        self._lock = threading.RLock()
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __enter__(self):
        self._lock.acquire()
        self.num_entered += 1
        if self.num_entered == self.nth:
            raise KeyboardInterrupt

    def __exit__(self, *exception):
        self._lock.release()

    @property
    def is_free(self):
        """Whether another thread can have it."""
        taken = []

        def take():
            taken.append(self._lock.acquire(blocking=False))
            if taken[0]:
                self._lock.release()

        thread = threading.Thread(target=take)
        thread.start()
        thread.join()
        return taken[0]


def meet(lockstep, replica_id):
    action = lambda payloads: {r: sum(payloads.values()) for r in payloads}  # noqa: E731
    return lockstep.merge(replica_id, MergePoint("sum", (), replica_id, action))


@contextmanager
def replicas(schedule):
    """Gives three replicas under a schedule, and the tasks of a run with a merge."""
    lockstep = Lockstep(("a", "b", "c"), schedule=schedule, timeout_seconds=None)
    yield lockstep, {r: lambda r=r: meet(lockstep, r) for r in range(N)}
    lockstep.close()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_interrupt_that_loses_the_mutex_leaves_no_thread_behind(monkeypatch, schedule):
    monkeypatch.setattr(lockstep_module, "DRAIN_SECONDS", 60.0)
    num_hit = 0
    while True:
        with replicas(schedule) as (lockstep, tasks):
            lock = lockstep._mutex = LosingLock(num_hit + 1)
            try:
                assert lockstep.run(tasks) == dict.fromkeys(range(N), 3)
            except KeyboardInterrupt:
                num_hit += 1
                assert lock.is_free
                assert not lockstep.usable
                assert not any(thread.is_alive() for thread in lockstep._threads.all())
            else:
                break
    assert num_hit > N


def test_an_interrupt_of_a_baton_leaves_its_lock_free():
    baton = Baton()
    baton.post(same_cpu=False)
    baton._pinning = LosingLock(1)
    with pytest.raises(KeyboardInterrupt):
        baton.wait()
    assert baton._pinning.is_free


@pytest.mark.skipif(replica_threads._current_cpu is None, reason="threads cannot be moved here")
def test_an_interrupt_of_a_post_leaves_the_lock_of_the_baton_free():
    baton = Baton()
    baton._pinning = LosingLock(1)
    with pytest.raises(KeyboardInterrupt):
        baton.post(same_cpu=True)
    assert baton._pinning.is_free


@pytest.fixture
def printed(monkeypatch):
    """The types of the exceptions that threads have ended with, which Python prints."""
    types = []
    monkeypatch.setattr(threading, "excepthook", lambda args: types.append(args.exc_type))
    return types


def test_a_cancelled_thread_ends_silently(printed):
    def work(replica_id):
        threads.wait_for_run(replica_id)
        raise RunCancelled

    threads = ReplicaThreads(["a"], work)
    threads.wake(0, same_cpu=False)
    threads.all()[0].join()
    threads.close()
    assert printed == []


def test_a_thread_is_cancelled_only_in_its_work(printed):
    begin, end = threading.Event(), threading.Event()

    def bootstrap():  # as Python's own code around the work of a thread
        begin.set()
        end.wait()

    thread = threading.Thread(target=bootstrap)
    thread.start()
    begin.wait()
    cancel_thread(thread)
    end.set()
    thread.join()
    assert printed == []


def test_an_exception_that_is_late_arrives_before_the_thread_ends(printed, monkeypatch):
    end_work, hits = replica_threads._end_work, []

    def hit(ident):
        if not hits:
            hits.append(ident)
            throw_into_thread(threading.current_thread(), RunCancelled)
        end_work(ident)

    monkeypatch.setattr(replica_threads, "_end_work", hit)
    num_calls = []
    threads = ReplicaThreads(["a"], num_calls.append)
    threads._start(0)
    threads.all()[0].join()
    assert (num_calls, len(hits), printed) == ([0], 1, [])
    assert threads.all()[0].ident not in replica_threads._cancellable
