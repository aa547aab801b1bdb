"""Replica threads keep nothing between runs; Ctrl-C ends only the run that it interrupts."""

import random
import threading
from pathlib import Path

import pytest

from mirror.threads.lockstep import Lockstep
from mirror.threads.merge_point import MergePoint
from tests.oracle import finishes
from tests.threads.interrupts import CASES


@pytest.fixture
def lockstep():
    made = Lockstep(("a", "b", "c"), schedule="staggered", timeout_seconds=None)
    yield made
    made.close()


def add(lockstep, replica_id, value):
    def action(values):
        return dict.fromkeys(values, sum(values.values()))

    return lockstep.merge(replica_id, MergePoint("add", (), value, action))


def tasks(lockstep, replica_ids=(0, 1, 2), num_merges=1, failing=None):
    def task(r):
        for i in range(num_merges):
            total = add(lockstep, r, r + i)
            if r == failing:
                raise ValueError(f"replica {r}")
        return total if num_merges else r

    return {r: lambda r=r: task(r) for r in replica_ids}


def test_a_thread_that_ends_a_run_late_waits_at_its_own_gate(lockstep, monkeypatch):
    # Replica 0 has a thread of its own in the first run and the caller's in the second, which
    # begins before that thread waits.
    second_begins, threads, stop = threading.Event(), lockstep._threads, lockstep._stop

    def stop_late(replica_id, point):
        came_back = stop(replica_id, point)
        if replica_id == 0 and threading.current_thread() is not threads.caller:
            assert second_begins.wait(60)
        return came_back

    monkeypatch.setattr(lockstep, "_stop", stop_late)
    lockstep.run(tasks(lockstep, num_merges=0), at_once=True)

    def waits_somewhere():
        return any(gate._sleeper for gate in (threads._turn_here, threads._turns[0]))

    def first():
        assert threads.here == 0
        second_begins.set()
        while not waits_somewhere():
            pass
        return threads._turn_here._sleeper

    results, error, _ = finishes(
        lambda: lockstep.run({0: first, 1: lambda: 1, 2: lambda: 2}, at_once=False)
    )
    assert error is None
    assert results == {0: None, 1: 1, 2: 2}


@pytest.mark.parametrize("seed", range(4))
def test_runs_of_every_kind_follow_each_other(lockstep, seed):
    draw = random.Random(seed)

    def program():
        for _ in range(300):
            replica_ids = sorted(draw.sample(range(3), draw.randint(1, 3)))
            num_merges, at_once = draw.randint(0, 3), draw.choice([True, False, None])
            failing = draw.choice(replica_ids) if num_merges and draw.random() < 0.2 else None
            run = tasks(lockstep, replica_ids, num_merges, failing)
            if failing is not None:
                with pytest.raises(ValueError, match=f"replica {failing}"):
                    lockstep.run(run, at_once=at_once)
                continue
            total = sum(replica_ids) + len(replica_ids) * (num_merges - 1)
            expected = {r: total if num_merges else r for r in replica_ids}
            assert lockstep.run(run, at_once=at_once) == expected

    _, error, _ = finishes(program, hang_after=120)
    assert error is None


def test_threads_that_others_ask_for_are_those_of_one_moment(lockstep):
    # A watchdog asks from a thread of its own, while runs begin and end.
    asked, is_over = threading.Event(), threading.Event()
    errors = []

    def ask():
        try:
            while not is_over.is_set():
                lockstep._threads.started_threads((0, 1, 2))
                asked.set()
        except KeyError as error:
            errors.append(error)
            asked.set()

    watchdog = threading.Thread(target=ask)
    watchdog.start()
    assert asked.wait(60)
    for at_once in (True, False) * 100:
        lockstep.run(tasks(lockstep), at_once=at_once)
    is_over.set()
    watchdog.join()
    assert errors == []


@pytest.fixture(scope="module")
def interrupted(script_pool):
    """Gives ``interrupted(schedule)``: what interrupts.py says of every case."""
    known = {}

    def run(schedule):
        if schedule not in known:
            done = script_pool.run(Path(__file__).with_name("interrupts.py").read_text(), schedule)
            assert done.returncode == 0, done.stderr
            lines = (line.split(maxsplit=1) for line in done.stdout.splitlines())
            known[schedule] = dict(lines)
        return known[schedule]

    return run


@pytest.mark.parametrize("schedule", ["lockstep", "staggered", "parallel"])
@pytest.mark.parametrize("case", [case.__name__ for case in CASES])
def test_an_interrupt_ends_the_run_and_nothing_else(interrupted, schedule, case):
    assert interrupted(schedule)[case] == "KeyboardInterrupt True ends"
