"""Replica threads: their state, and the baton that wakes them."""

import contextvars
import os
import threading
from functools import partial
from time import sleep

import pytest
import torch

import mirror
from mirror.threads import replica_threads
from mirror.threads.lockstep import Lockstep
from mirror.threads.replica_threads import Baton, ReplicaThreads
from tests.oracle import finishes
from tests.toy_models import meet, replica_id

N = 3


def test_what_a_replica_sets_for_its_thread_does_not_reach_the_caller(strategy):
    variable = contextvars.ContextVar("variable", default="caller's")

    def fn():
        before = (variable.get(), torch.is_grad_enabled())
        variable.set(replica_id())
        torch.set_grad_enabled(False)
        meet()
        return (*before, variable.get())

    for _ in range(2):
        assert strategy.local_results(strategy.run(fn)) == tuple(
            ("caller's", True, r) for r in range(N)
        )
        assert variable.get() == "caller's"
        assert torch.is_grad_enabled()
        assert not mirror.has_strategy()
        assert mirror.get_replica_context().num_replicas_in_sync == 1


def test_what_the_caller_has_set_holds_on_all_replicas(strategy):
    variable = contextvars.ContextVar("variable")
    variable.set("caller's")

    def fn():
        meet()
        return (
            variable.get(),
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
        )

    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        states = strategy.local_results(strategy.run(fn))
    assert states == (("caller's", False, False, True, torch.bfloat16),) * N
    with torch.inference_mode():
        states = strategy.local_results(strategy.run(fn))
    assert [state[1:4] for state in states] == [(False, True, False)] * N
    assert [s[1:4] for s in strategy.local_results(strategy.run(fn))] == [(True, False, False)] * N


def test_runs_inside_merge_call_nest(strategy):
    def innermost(value):
        return value + meet()

    def inner(value):
        context = mirror.get_replica_context()
        assert context.num_replicas_in_sync == N
        value = context.merge_call(lambda s, v: s.run(innermost, args=(v,)), args=(value,))
        return value * 10

    def outer():
        r = replica_id()
        context = mirror.get_replica_context()
        value = torch.full((1,), float(r))
        for _ in range(2):
            value = context.merge_call(lambda s, v: s.run(inner, args=(v,)), args=(value,))
            assert replica_id() == r
            meet()
        return value

    results, error, _ = finishes(lambda: strategy.run(outer))
    assert error is None
    assert [v.item() for v in results.values] == [((r + N) * 10 + N) * 10 for r in range(N)]


def test_the_caller_looks_at_no_thread_that_is_only_being_started(monkeypatch):
    start = ReplicaThreads._start

    def start_late(self, replica_id):
        sleep(0.01)  # the caller looks every 10 us
        start(self, replica_id)

    monkeypatch.setattr(ReplicaThreads, "_start", start_late)
    lockstep = Lockstep(["a", "b", "c"], schedule="staggered", timeout_seconds=20)
    assert lockstep.run({r: partial(int, r) for r in range(3)}) == {0: 0, 1: 1, 2: 2}
    lockstep.close()


needs_affinity = pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity"), reason="threads cannot be moved here"
)


@pytest.fixture
def cpus(monkeypatch):
    """Gives threads affinities that are noted, on a machine of four CPUs; the caller is on 2."""
    affinity, calls = {}, []

    def get(thread):
        calls.append("get")
        return affinity.get(thread or threading.get_native_id(), {0, 1, 2, 3})

    def put(thread, cpus):
        calls.append("set")
        affinity[thread or threading.get_native_id()] = set(cpus)

    monkeypatch.setattr(os, "sched_getaffinity", get, raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", put, raising=False)
    monkeypatch.setattr(replica_threads, "_current_cpu", lambda: 2)
    return affinity, calls


def waits(gate, meanwhile, timeout=20):
    """Has another thread wait at the gate; returns its number and whether it was let through."""
    done, numbers = [], []

    def wait():
        numbers.append(threading.get_native_id())
        done.append(gate.wait(timeout))

    thread = threading.Thread(target=wait)
    thread.start()
    while gate._sleeper is None and thread.is_alive():
        pass
    meanwhile(numbers[0])
    thread.join(20)
    return numbers[0], done[0]


def test_a_post_is_consumed_by_one_wait():
    gate = Baton()
    gate.post(same_cpu=False)
    with pytest.raises(RuntimeError):
        gate.post(same_cpu=False)
    assert gate.wait()
    assert not gate.wait(0.001)


def test_a_wait_without_a_post_on_the_same_cpu_makes_no_system_call(cpus):
    # Under "staggered" no thread is moved, and the caller polls 300 times a second.
    gate, (affinity, calls) = Baton(), cpus
    for _ in range(3):
        gate.wait(0.0001)
    _, done = waits(gate, lambda thread: gate.post(same_cpu=False))
    assert done
    assert (affinity, calls) == ({}, [])


def test_a_thread_woken_on_the_same_cpu_runs_there_once(cpus, monkeypatch):
    gate, (affinity, _), moved = Baton(), cpus, []
    put = os.sched_setaffinity
    monkeypatch.setattr(
        os, "sched_setaffinity", lambda *a: moved.append(a[1]) or put(*a), raising=False
    )
    thread, done = waits(gate, lambda _: gate.post(same_cpu=True))
    assert done
    assert moved == [{2}, {0, 1, 2, 3}]
    assert affinity == {thread: {0, 1, 2, 3}}


def test_an_affinity_that_others_have_set_meanwhile_stays(cpus, monkeypatch):
    gate, (affinity, _) = Baton(), cpus
    put = os.sched_setaffinity
    monkeypatch.setattr(os, "sched_setaffinity", lambda t, c: put(t, {0, 1}), raising=False)
    thread, _ = waits(gate, lambda _: gate.post(same_cpu=True))
    assert affinity == {thread: {0, 1}}


def test_a_thread_is_not_moved_to_a_cpu_outside_its_affinity(cpus):
    gate, (affinity, calls) = Baton(), cpus
    thread, _ = waits(
        gate, lambda thread: affinity.update({thread: {1}}) or gate.post(same_cpu=True)
    )
    assert affinity == {thread: {1}}
    assert "set" not in calls


def test_a_thread_that_times_out_while_it_is_moved_keeps_its_affinity(cpus, monkeypatch):
    # It stayed on that CPU, and its next wait took that for its own affinity.
    gate, (affinity, _) = Baton(), cpus
    looked, get = threading.Event(), os.sched_getaffinity

    class TimesOut:
        def acquire(self, timeout):
            assert looked.wait(20)
            return False

        def release(self):
            pass

    def slowly(thread):
        if thread:  # who opens asks for another thread's
            looked.set()
            threading.Event().wait(0.2)
        return get(thread)

    monkeypatch.setattr(os, "sched_getaffinity", slowly, raising=False)
    gate._lock = TimesOut()
    thread, done = waits(gate, lambda _: gate.post(same_cpu=True))
    assert not done
    assert affinity == {thread: {0, 1, 2, 3}}
    assert gate._affinities is None


@needs_affinity
def test_threads_that_meet_near_may_use_all_cpus_between():
    gates, allowed, seen = [Baton(), Baton()], os.sched_getaffinity(0), []

    def other():
        for _ in range(50):
            gates[1].wait()
            seen.append(os.sched_getaffinity(0))
            gates[0].post(same_cpu=True)

    thread = threading.Thread(target=other)
    thread.start()
    for _ in range(50):
        gates[1].post(same_cpu=True)
        gates[0].wait()
        seen.append(os.sched_getaffinity(0))
    thread.join(20)
    assert seen == [allowed] * 100


def test_a_signal_that_comes_just_before_the_callers_thread_sleeps_is_handled():
    # It does not wake the thread, which must wake up on its own.
    waiting, timeouts = Baton(is_of_caller=True), []

    class Lock:
        """Python handles signals between two calls."""

        def acquire(self, timeout):
            timeouts.append(timeout)
            return len(timeouts) == 3

    waiting._lock = Lock()
    assert waiting.wait()
    assert timeouts == [replica_threads.SIGNAL_SECONDS] * 3
