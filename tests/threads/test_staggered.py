"""Replicas of GPUs: one executes Python at a time; the next begins at backward, or at a stall."""

import gc
import random
import sys
import threading
import time
import weakref

import pytest
import torch
from torch import nn

import mirror
from mirror.threads import lockstep as lockstep_module
from mirror.threads import schedule
from mirror.threads.lockstep import Lockstep
from mirror.threads.merge_point import MergePoint
from mirror.threads.schedule import StallDetector
from mirror.threads.user_frames import positions
from tests.gpu.fake import FakeGpus
from tests.oracle import finishes
from tests.toy_models import meet, replica_id

SYSTEM_SECONDS = 60e-6  # that a pause takes longer than asked for


def poll_launching(monkeypatch, launch_us, python_us, *, seconds=0.2, num_next=7):
    """Polls a replica that launches without Python, on a virtual clock; starts what is due.

    Returns:
        The number of polls, and the times in ms and numbers of the starts.
    """
    now = [0.0]
    monkeypatch.setattr(schedule, "monotonic", lambda: now[0])
    detector = StallDetector(float("inf"), is_staggered=True)
    phases = [random.Random(r).random() * 100 for r in range(num_next + 1)]
    num_polls, starts, begun = 0, [], 1
    while now[0] < seconds:
        now[0] += detector.pause_seconds + SYSTEM_SECONDS
        num_polls += 1
        where = []
        for phase in phases[:begun]:
            number, rest = divmod(now[0] * 1e6 + phase, launch_us + python_us)
            where.append((number, None if rest < launch_us else rest))
        due = detector.poll(begun, where, num_next + 1 - begun)
        if due:
            starts.append((now[0] * 1e3, due))
            begun += due
    return num_polls, starts


@pytest.mark.parametrize("launch_us", [20, 48, 100, 200, 400, 700, 1000])
@pytest.mark.parametrize("python_us", [0.001, 12, 300])
def test_launches_are_no_stalls(monkeypatch, launch_us, python_us):
    num_polls, starts = poll_launching(monkeypatch, launch_us, python_us)
    assert starts == []
    assert num_polls <= 0.2 * 400


def test_others_start_some_milliseconds_after_a_replica_has_blocked(monkeypatch):
    _, starts = poll_launching(monkeypatch, 1e9, 1, seconds=0.02)
    (first, one), (second, rest) = starts
    assert (one, rest) == (1, 6)
    assert 1.5 <= first <= 3.2
    assert second <= 6.3


def staggered(num_replicas, devices=None):
    names = tuple(f"replica {r}" for r in range(num_replicas))
    lockstep = Lockstep(names, schedule="staggered", timeout_seconds=None)
    if devices is not None:
        lockstep.devices = devices
    return lockstep


def run(lockstep, task, num_replicas):
    tasks = {r: (lambda r=r: task(r)) for r in range(num_replicas)}
    results, error, _ = finishes(lambda: lockstep.run(tasks), hang_after=60)
    lockstep.close()
    assert error is None
    return results


@pytest.fixture
def without_stalls(monkeypatch):
    monkeypatch.setattr(StallDetector, "poll", lambda *_: 0)
    monkeypatch.setattr(lockstep_module, "LONG_CALL_SECONDS", 1e6)


# Positions


def wait_for(event):
    event.wait()


def calls_in_a_loop(begun, go):
    for i in range(2):
        begun[i].set()
        wait_for(go[i])


def test_the_same_instruction_in_the_next_call_is_another_position():
    begun, go = ([threading.Event() for _ in range(2)] for _ in range(2))
    thread = threading.Thread(target=calls_in_a_loop, args=(begun, go))
    thread.start()
    seen = []
    for i in range(2):
        begun[i].wait(20)
        time.sleep(0.01)  # it has come to sleep on the lock
        seen += [positions([thread]), positions([thread])]
        go[i].set()
    thread.join()
    assert seen[0] == seen[1]
    assert seen[2] == seen[3]
    assert seen[0] != seen[2]


def test_positions_keep_nothing_of_a_thread_alive():
    begun, go = threading.Event(), threading.Event()

    def hold():
        held = nn.Linear(1, 1)
        found.append(weakref.ref(held))
        begun.set()
        go.wait()
        del held

    found = []
    thread = threading.Thread(target=hold)
    thread.start()
    begun.wait(20)
    kept = [positions([thread]) for _ in range(3)]
    go.set()
    thread.join()
    gc.collect()
    assert len(kept) == 3
    assert found[0]() is None


def test_a_frame_that_a_debugger_traces_stays_as_it_is():
    lines, begun, go = [], threading.Event(), threading.Event()

    def traced():
        begun.set()
        go.wait()
        return 1

    def trace(frame, event, argument):
        if frame.f_code is not traced.__code__:
            return None
        if event == "line":
            lines.append(frame.f_lineno)
        return trace

    def target():
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            traced()
        finally:
            sys.settrace(before)

    thread = threading.Thread(target=target)
    thread.start()
    begun.wait(20)
    for _ in range(3):
        positions([thread])
    go.set()
    thread.join()
    assert len(lines) == 3


# One in Python


class Counter:
    """Counts the replicas in Python, and in all, between their merges."""

    def __init__(self):
        self.now, self.most, self.lock = 0, 0, threading.Lock()

    def __enter__(self):
        with self.lock:
            self.now += 1
            self.most = max(self.most, self.now)

    def __exit__(self, *_):
        with self.lock:
            self.now -= 1


def meet_in(lockstep, replica_id):
    lockstep.merge(replica_id, MergePoint("meet", (), None, lambda payloads: payloads))


@pytest.mark.parametrize("num_replicas", [2, 3, 8])
@pytest.mark.parametrize("meets_inside", [False, True])
def test_replicas_of_distinct_gpus_overlap_in_long_calls_only(
    without_stalls, num_replicas, meets_inside
):
    lockstep, python, order = staggered(num_replicas), Counter(), []
    together = threading.Barrier(num_replicas, timeout=20)

    def task(r):
        for _ in range(3):
            with python:
                order.append(("forward", r))
            assert lockstep.let_next_begin(r)
            assert not lockstep.let_next_begin(r)  # inside
            together.wait()
            if meets_inside:
                meet_in(lockstep, r)
                together.wait()
            lockstep.wait_for_turn(r)
            with python:
                order.append(("step", r))
                time.sleep(0.001)
            meet_in(lockstep, r)

    run(lockstep, task, num_replicas)
    assert python.most == 1
    replicas = range(num_replicas)
    assert order[:num_replicas] == [("forward", r) for r in replicas]
    assert sorted(order) == sorted([(k, r) for k in ("forward", "step") for r in replicas] * 3)


def test_a_replica_goes_on_after_a_long_call_when_the_other_lets_it(without_stalls):
    lockstep, order, first_waits = staggered(2), [], threading.Event()

    def first():
        lockstep.let_next_begin(0)
        first_waits.set()
        lockstep.wait_for_turn(0)
        order.append("first")

    def second():
        first_waits.wait(20)
        time.sleep(0.02)
        order.append("second")
        lockstep.let_next_begin(1)
        lockstep.wait_for_turn(1)

    run(lockstep, lambda r: (first, second)[r](), 2)
    assert order == ["second", "first"]


@pytest.mark.parametrize(
    ("devices", "most"),
    [("aaaa", 1), ("aabb", 2), ("abab", 2), ("abcd", 4), ("aaab", 2)],
)
def test_replicas_that_share_a_gpu_do_not_overlap(without_stalls, devices, most):
    lockstep, inside = staggered(4, devices), Counter()
    per_device = {device: Counter() for device in devices}
    together = threading.Barrier(most, timeout=20)

    def task(r):
        for i in range(2):
            with inside, per_device[devices[r]]:
                lockstep.let_next_begin(r)
                if r == devices.index(devices[r]) and i == 0:  # the first on each device
                    together.wait()
                lockstep.wait_for_turn(r)
            meet_in(lockstep, r)

    run(lockstep, task, 4)
    assert [counter.most for counter in per_device.values()] == [1] * len(per_device)
    assert inside.most == most


# Blocked ones


def test_a_replica_that_waits_to_go_on_starts_when_the_other_waits_for_its_lock():
    lockstep, lock, second_runs = staggered(2), threading.Lock(), threading.Event()

    def task(r):
        if r == 1:
            second_runs.set()
        with lock:
            lockstep.let_next_begin(r)
            if r == 0:
                second_runs.wait(20)
            lockstep.wait_for_turn(r)
        return r

    assert run(lockstep, task, 2) == {0: 0, 1: 1}


@pytest.mark.parametrize("where", ["before", "inside", "after"])
@pytest.mark.parametrize("devices", ["aaa", "abc"])
def test_replicas_that_wait_for_all_others_start_them(where, devices):
    lockstep, together = staggered(3, devices), threading.Barrier(3, timeout=20)

    def task(r):
        if where == "before":
            together.wait()
        lockstep.let_next_begin(r)
        if where == "inside":
            together.wait()
        lockstep.wait_for_turn(r)
        if where == "after":
            together.wait()

    run(lockstep, task, 3)


def test_a_failing_replica_releases_those_that_wait_to_go_on(without_stalls):
    lockstep, waits = staggered(2), threading.Event()

    def task(r):
        if r == 1:
            waits.wait(20)
            time.sleep(0.01)
            raise ValueError("on purpose")
        lockstep.let_next_begin(r)
        waits.set()
        lockstep.wait_for_turn(r)
        raise AssertionError("goes on in a run that has failed")

    tasks = {r: (lambda r=r: task(r)) for r in range(2)}
    _, error, _ = finishes(lambda: lockstep.run(tasks))
    assert isinstance(error, ValueError)
    lockstep.close()


@pytest.mark.parametrize("schedule", ["staggered", "parallel"])
def test_a_replica_does_not_wait_for_its_turn_while_others_wait_for_its_lock(
    monkeypatch, schedule
):
    monkeypatch.setattr(lockstep_module, "BLOCKED_SECONDS", 0.2)
    lockstep = Lockstep(("a", "b", "c"), schedule=schedule, timeout_seconds=None)
    lock, others = threading.Lock(), threading.Barrier(3, timeout=20)

    def task(r):
        if r:
            others.wait()
            with lock:
                return r
        with lock:
            others.wait()
            return lockstep.take_turns(r)

    assert run(lockstep, task, 3) == {0: False, 1: 1, 2: 2}


@pytest.mark.parametrize("schedule", ["staggered", "parallel"])
def test_a_program_that_holds_a_lock_the_others_need_is_told_so(
    make_strategy, monkeypatch, schedule
):
    monkeypatch.setattr(lockstep_module, "BLOCKED_SECONDS", 0.2)
    strategy = make_strategy(2, schedule="parallel")
    strategy._group.runner.locksteps.schedule = schedule
    lock, both = threading.Lock(), threading.Barrier(2, timeout=20)

    def step():
        if replica_id() == 1:
            both.wait()
        with lock:
            if replica_id() == 0:
                both.wait()
                torch.manual_seed(0)
        return replica_id()

    strategy.run(meet)  # the first run takes turns
    _, error, _ = finishes(lambda: strategy.run(step))
    assert isinstance(error, mirror.StrategyError)
    assert "wait for a lock" in str(error)


def test_replicas_that_wait_to_go_on_do_so_when_one_needs_turns(without_stalls):
    """In turns the one that needs them would wait for a lock that the other holds."""
    lockstep, lock, waits = staggered(2), threading.Lock(), threading.Event()

    def task(r):
        if r == 1:
            waits.wait(20)
            time.sleep(0.01)
            turn = lockstep.take_turns(1)
            with lock:
                return turn
        with lock:
            lockstep.let_next_begin(0)
            waits.set()
            lockstep.wait_for_turn(0)
        return True

    assert run(lockstep, task, 2) == {0: True, 1: True}


# Programs


@pytest.mark.parametrize(
    ("num_gpus", "devices", "most"),
    [(1, [0, 0, 0, 0], 1), (2, [0, 1], 2), (4, [0, 1, 2, 3], 4), (2, [0, 0, 1, 1], 2)],
)
def test_the_replica_of_the_next_gpu_begins_at_backward(without_stalls, num_gpus, devices, most):
    inside, python, order = Counter(), Counter(), []
    together = threading.Barrier(most, timeout=20)
    with FakeGpus(num_gpus):
        names = [f"cuda:{i}" for i in devices]
        strategy = mirror.MirroredStrategy(names, backend="naive", schedule="staggered")

        def wait_for_others(grad):
            if not strategy._group.runner.running.lockstep.takes_turns and (
                replica_id() == devices.index(devices[replica_id()])
            ):
                together.wait()

        def step():
            device = mirror.get_replica_context().device
            with inside:
                with python:
                    order.append(replica_id())
                    x = torch.ones(2, device=device, requires_grad=True)
                    y = x * 2
                    y.register_hook(wait_for_others)
                y.sum().backward()
                with python:
                    order.append(replica_id())
                    time.sleep(0.001)
            meet_there()

        def meet_there():
            context = mirror.get_replica_context()
            context.all_reduce("sum", torch.ones(1, device=context.device))

        with strategy:
            strategy.run(meet_there)  # the first run takes turns
            _, error, _ = finishes(lambda: strategy.run(step))
    assert error is None
    assert inside.most == most
    assert python.most == 1
    assert len(order) == 2 * len(devices)
