"""Gates, and the CPU on which a thread that waited at one goes on."""

import os
import threading

import pytest

from mirror.threads import baton
from mirror.threads.baton import Baton

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
    monkeypatch.setattr(baton, "_current_cpu", lambda: 2)
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


def test_a_gate_is_closed_behind_who_went_through():
    gate = Baton()
    gate.post(near=False)
    with pytest.raises(RuntimeError):
        gate.post(near=False)
    assert gate.wait()
    assert not gate.wait(0.001)


def test_a_wait_that_nobody_ends_near_makes_no_system_call(cpus):
    # Under "staggered" nobody is moved, and the caller looks 3000 times a second.
    gate, (affinity, calls) = Baton(), cpus
    for _ in range(3):
        gate.wait(0.0001)
    _, done = waits(gate, lambda thread: gate.post(near=False))
    assert done
    assert (affinity, calls) == ({}, [])


def test_who_is_let_through_near_goes_on_there_and_then_anywhere_again(cpus, monkeypatch):
    gate, (affinity, _), moved = Baton(), cpus, []
    put = os.sched_setaffinity
    monkeypatch.setattr(
        os, "sched_setaffinity", lambda *a: moved.append(a[1]) or put(*a), raising=False
    )
    thread, done = waits(gate, lambda _: gate.post(near=True))
    assert done
    assert moved == [{2}, {0, 1, 2, 3}]
    assert affinity == {thread: {0, 1, 2, 3}}


def test_an_affinity_that_others_have_set_meanwhile_stays(cpus, monkeypatch):
    gate, (affinity, _) = Baton(), cpus
    put = os.sched_setaffinity
    monkeypatch.setattr(os, "sched_setaffinity", lambda t, c: put(t, {0, 1}), raising=False)
    thread, _ = waits(gate, lambda _: gate.post(near=True))
    assert affinity == {thread: {0, 1}}


def test_who_may_not_run_there_is_not_moved(cpus):
    gate, (affinity, calls) = Baton(), cpus
    thread, _ = waits(gate, lambda thread: affinity.update({thread: {1}}) or gate.post(near=True))
    assert affinity == {thread: {1}}
    assert "set" not in calls


def test_who_times_out_while_it_is_moved_keeps_its_affinity(cpus, monkeypatch):
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
    thread, done = waits(gate, lambda _: gate.post(near=True))
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
            gates[0].post(near=True)

    thread = threading.Thread(target=other)
    thread.start()
    for _ in range(50):
        gates[1].post(near=True)
        gates[0].wait()
        seen.append(os.sched_getaffinity(0))
    thread.join(20)
    assert seen == [allowed] * 100
