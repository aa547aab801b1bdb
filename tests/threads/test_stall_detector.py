"""Stalls: they are detected, and where every replica is can be reported at any moment."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from mirror.threads import schedule
from mirror.threads.lockstep import Lockstep
from mirror.threads.merge_point import MergePoint
from mirror.threads.schedule import FIRST_SECONDS, LAST_SECONDS, StallDetector
from tests.oracle import finishes
from tests.toy_models import meet


def staggered(num_replicas):
    names = tuple(f"replica {r}" for r in range(num_replicas))
    return Lockstep(names, schedule="staggered", timeout_seconds=None)


@pytest.fixture
def nobody_looks(monkeypatch):
    monkeypatch.setattr(schedule, "FIRST_SECONDS", 1e6)
    monkeypatch.setattr(schedule, "LAST_SECONDS", 1e6)


# What a lookout makes of what it sees


def test_the_next_begins_after_one_unchanged_look_and_the_rest_after_the_second():
    watch = StallDetector(float("inf"), is_staggered=True)
    assert watch.poll(1, ["a"], 7) == 0
    assert watch.poll(1, ["a"], 7) == 1
    assert watch.poll(2, ["a", "b"], 6) == 0
    assert watch.poll(2, ["a", "b"], 6) == 6


@pytest.mark.parametrize(
    "between",
    [
        [(2, ["a", "b"]), (2, ["a", "c"]), (2, ["a", "c"])],  # the new one has moved
        [(2, ["a", "b"]), (2, ["d", "b"]), (2, ["d", "b"])],  # the first one goes on
        [(3, ["b", "c"]), (3, ["b", "c"])],  # a merge has given a turn
        [(2, ["a", "b"]), (2, []), (2, ["a", "b"]), (2, ["a", "b"])],  # its action has run
    ],
)
def test_one_at_a_time_begins_where_replicas_have_moved_in_between(between):
    watch = StallDetector(float("inf"), is_staggered=True)
    watch.poll(1, ["a"], 7)
    assert watch.poll(1, ["a"], 7) == 1
    *others, last = between
    assert [watch.poll(*seen, 6) for seen in others] == [0] * len(others)
    assert watch.poll(*last, 6) == 1


def test_looks_come_fast_after_a_turn_and_slower_while_replicas_move():
    watch = StallDetector(float("inf"), is_staggered=True)
    assert watch.pause_seconds == FIRST_SECONDS
    pauses = []
    for i in range(9):
        watch.poll(1, [i], 1)
        pauses.append(watch.pause_seconds)
    assert pauses == sorted(pauses)
    assert pauses[-1] == LAST_SECONDS
    watch.poll(2, [8], 0)
    assert watch.pause_seconds == FIRST_SECONDS


def test_what_stands_still_for_longer_than_the_limit_is_overdue(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(schedule, "monotonic", lambda: now[0])
    watch = StallDetector(10.0, is_staggered=False)
    assert watch.pause_seconds == 10.0
    for num_turns, where, time, is_overdue in [
        (1, [None], 10.0, False),
        (2, [None], 19.0, False),
        (2, [], 28.0, False),  # a merge's action, which no limit holds for
        (2, [None], 37.0, False),
        (2, [None], 48.0, True),
    ]:
        now[0] = time
        assert watch.poll(num_turns, where, 1) == 0
        assert watch.is_overdue == is_overdue, time


# Replicas that block


@pytest.mark.parametrize("num_replicas", [2, 4, 8])
@pytest.mark.parametrize("meets", [False, True])
def test_replicas_that_all_block_at_one_place_have_begun_after_two_standstills(
    monkeypatch, num_replicas, meets
):
    # Each took two looks, so that the last of eight began after fourteen; and again after a merge.
    given, least = [], []
    look = StallDetector.poll
    monkeypatch.setattr(
        StallDetector, "poll", lambda *seen: (lambda due: given.append(due) or due)(look(*seen))
    )
    lockstep = staggered(num_replicas)

    def block(replica_id, together):
        if meets:
            lockstep.merge(replica_id, MergePoint("meet", (), None, lambda payloads: payloads))
            if together.n_waiting == 0:
                given.clear()
        together.wait()

    for _ in range(20):  # one seen while it gets going is taken to move
        given.clear()
        together = threading.Barrier(num_replicas, timeout=20)
        tasks = {r: (lambda r=r, b=together: block(r, b)) for r in range(num_replicas)}
        _, error, _ = finishes(lambda tasks=tasks: lockstep.run(tasks), hang_after=60)
        assert error is None
        least.append([due for due in given if due])
    lockstep.close()
    assert min(map(len, least)) <= min(2, num_replicas - 1)


def test_a_replica_lets_the_next_begin_by_hand(nobody_looks):
    lockstep, num_replicas = staggered(4), 4
    together = threading.Barrier(num_replicas, timeout=20)

    def task(replica_id):
        for _ in range(3):
            lockstep.let_next_begin(replica_id)
            together.wait()
            lockstep.merge(replica_id, MergePoint("meet", (), None, lambda payloads: payloads))

    tasks = {r: (lambda r=r: task(r)) for r in range(num_replicas)}
    _, error, _ = finishes(lambda: lockstep.run(tasks), hang_after=60)
    assert error is None
    lockstep.close()


def test_a_replica_starts_at_most_one_successor(nobody_looks):
    lockstep, begun = staggered(3), []
    second_is_there, first_has_tried = threading.Event(), threading.Event()

    def first():
        lockstep.let_next_begin(0)
        assert second_is_there.wait(20)
        for _ in range(2):
            lockstep.let_next_begin(0)
        begun.append(0)
        first_has_tried.set()

    def second():
        second_is_there.set()
        assert first_has_tried.wait(20)
        begun.append(1)

    tasks = {0: first, 1: second, 2: lambda: begun.append(2)}
    _, error, _ = finishes(lambda: lockstep.run(tasks), hang_after=60)
    assert error is None
    assert begun == [0, 1, 2]
    lockstep.close()


def test_a_run_in_lockstep_stays_in_order_when_a_replica_blocks():
    # What activation checkpointing saves is counted on, in the order in which it was.
    lockstep, order = staggered(3), []

    def task(replica_id):
        order.append(replica_id)
        lockstep.let_next_begin(replica_id)
        threading.Event().wait(0.01)  # long enough for many looks
        order.append(replica_id)

    tasks = {r: (lambda r=r: task(r)) for r in range(3)}
    _, error, _ = finishes(lambda: lockstep.run(tasks, at_once=False), hang_after=60)
    assert error is None
    assert order == [0, 0, 1, 1, 2, 2]
    lockstep.close()


def test_the_next_begins_when_a_backward_pass_does(make_strategy, nobody_looks):
    # The engine works without the interpreter: this replica is not stalled.
    strategy = make_strategy(3, schedule="lockstep")
    strategy._group.runner.locksteps.schedule = "staggered"  # that of GPUs
    together = threading.Barrier(3, timeout=20)

    def all_are_here(grad):
        together.wait()

    def fn():
        x = torch.ones(2, requires_grad=True)
        y = x * 2
        y.register_hook(all_are_here)
        y.sum().backward()
        meet()
        return x.grad

    results, error, _ = finishes(lambda: strategy.run(fn), hang_after=60)
    assert error is None
    assert [grad.tolist() for grad in strategy.local_results(results)] == [[2.0, 2.0]] * 3


FREEZES = '''
import os, sys, time
import mirror, torch

class Cycle:
    """Garbage with a finalizer that releases the GIL."""
    def __init__(self):
        self.me = self
    def __del__(self):
        [i for i in range(100)]

def deep(depth):
    if depth:
        return deep(depth - 1)
    for _ in range(50):
        Cycle()
    context = mirror.get_replica_context()
    if context.replica_id_in_sync_group == 1:
        time.sleep(0.01)  # long enough for the watcher of a staggered run
    else:
        context.all_reduce("sum", torch.ones(3))

sys.setswitchinterval(1e-5)
strategy = mirror.MirroredStrategy(["cpu"] * 4, schedule="staggered")
end = time.monotonic() + 10
while time.monotonic() < end:
    try:
        strategy.run(deep, args=(20,))
    except mirror.DivergenceError:
        continue
    raise SystemExit("no error")
print("done", flush=True)
os._exit(0)
'''


@pytest.mark.slow
def test_telling_where_replicas_stand_does_not_freeze_the_interpreter():
    """Two threads in ``sys._current_frames()`` while garbage is collected: CPython 3.11 stops.

    It holds a lock of the interpreter's while it makes frame objects; that may collect garbage,
    and finalizers may give the GIL to a thread that waits for that lock with the GIL held.
    """
    result = subprocess.run(
        [sys.executable, "-c", FREEZES],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.stdout == "done\n", result.stderr
