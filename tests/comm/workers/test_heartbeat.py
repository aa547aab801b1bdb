"""Heartbeats and the status of workers: how a worker leaves, and which waits can never end."""

import os
import random
import threading
import time

import pytest
from torch.distributed import HashStore, PrefixStore  # type: ignore[attr-defined]

from mirror.comm.workers import heartbeat as board_file
from mirror.comm.workers.heartbeat import (
    Exit,
    HeartbeatStore,
    PendingOp,
    WorkerStatus,
    find_deadlocks,
    find_ended_without,
)
from tests.interrupts.test_exits import in_child
from tests.pairs import every

SECONDS = 30.0
OVER = Exit(is_loss=False, words="over")


class Links:
    """What a strategy has."""

    def __init__(self):
        self.ends = []

    def drop(self, end):
        self.ends.append(end)


@pytest.fixture
def store():
    return PrefixStore("mirror/at", HashStore())


@pytest.fixture
def make(store):
    """Gives ``make(rank)``: a board of one of two workers, left after the test."""
    made = []

    def make(rank=1):
        made.append(HeartbeatStore(store.underlying_store, rank, 2, lambda error: ""))
        return made[-1]

    yield make
    for board in made:
        board.deregister()


def published(store, rank=1):
    return WorkerStatus.from_json(store.get(str(rank)))


def test_an_end_is_said_at_once_and_stays_the_first(make, store):
    board, links = make(), Links()
    number = board.next_number()
    board.register(number, links)
    assert board.end(number, OVER).wait(SECONDS)
    assert published(store).ended == {number: OVER}
    assert published(store).num_open == 0
    assert board.end(number, Exit(is_loss=True, words="lost")).wait(SECONDS)
    assert published(store).ended == {number: OVER}


def test_who_leaves_ends_the_strategies_that_are_there(make, store):
    board, links, gone = make(), Links(), Links()
    board.register("1", links)
    board.register("2", gone)
    del gone
    board.deregister()
    board.deregister()
    (end,) = links.ends
    assert published(store).end == end == Exit(is_loss=False, words="has left its program")
    assert board.end("1", end).is_set()  # no worker publishes it any more, and none waits for it


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks")
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_fork_is_no_worker_and_waits_for_nobody(make):
    board, links = make(), Links()
    board.register("1", links)

    def child():
        board.deregister()
        assert links.ends == []
        assert board.end("1", OVER).is_set()

    assert in_child(child) == 0


@pytest.mark.parametrize(
    ("position", "waits"),
    [
        (WorkerStatus(num_open=1), True),
        (WorkerStatus(num_open=1, end=OVER), False),
        (WorkerStatus(), False),
    ],
    ids=["goes-on", "has-left", "has-none"],
)
def test_whose_process_has_the_store_waits_for_who_may_read_it(
    make, store, position, waits, monkeypatch
):
    monkeypatch.setattr(board_file, "_LAST_SECONDS", 2 * SECONDS)
    monkeypatch.setattr(board_file, "_GONE_SECONDS", 0.3 if waits else 2 * SECONDS)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    store.set("1", position.to_json())
    begun = time.monotonic()
    leaving = threading.Thread(target=make(0).deregister)
    leaving.start()
    leaving.join(SECONDS)
    assert not leaving.is_alive()
    assert not waits or time.monotonic() - begun >= 0.3


def _status(begun, *waits, **other):
    return WorkerStatus(started=begun, waits=waits, **other)


def _wait(link, number):
    return PendingOp(link, number, f"operation {number} of {link}")


def _ranks(positions):
    return sorted({rank for rank, _ in find_deadlocks(positions)})


def test_a_position_is_said_and_heard():
    end = Exit(is_loss=True, words="gone")
    said = WorkerStatus(3, "a.py:1", {"1/main": 2}, (_wait("1/main", 2),), {"1": end}, 1, end, "!")
    assert WorkerStatus.from_json(said.to_json().encode()) == said
    assert WorkerStatus.from_json(WorkerStatus().to_json().encode()) == WorkerStatus()


def test_who_waits_for_one_that_goes_on_waits_with_reason():
    assert _ranks([_status({"1/a": 3}, _wait("1/a", 3)), _status({"1/a": 2})]) == []


def test_all_that_wait_for_the_same_are_only_slow():
    assert _ranks([_status({"1/a": 3}, _wait("1/a", 3))] * 3) == []


def test_a_circle_is_found_and_who_waits_for_it():
    circle = [
        _status({"1/a": 3, "1/b": 1}, _wait("1/a", 3)),
        _status({"1/a": 2, "1/b": 2}, _wait("1/b", 2)),
    ]
    assert _ranks(circle) == [0, 1]
    third = _status({"1/a": 3, "1/b": 1}, _wait("1/a", 3))
    assert _ranks([*circle, third]) == [0, 1, 2]


def test_one_of_two_waits_that_may_end_is_enough():
    both = [
        _status({"1/a": 4, "2/a": 3}, _wait("1/a", 4), _wait("2/a", 3)),
        _status({"1/a": 3, "1/b": 1, "2/a": 3}, _wait("1/b", 1)),
    ]
    assert _ranks(both) == []
    assert _ranks([_status({"1/a": 4, "2/a": 3}, _wait("1/a", 4)), both[1]]) == [0, 1]


def test_who_has_ended_is_told_to_those_it_leaves_alone():
    end = Exit(is_loss=False, words="has left")
    waits = _status({"1/a": 3}, _wait("1/a", 3))
    left = _status({"1/a": 2}, ended={"1": end})
    assert find_ended_without(waits.waits[0], [waits, left]) == [(1, end)]
    assert _ranks([waits, left]) == []  # it will have an error, and may come elsewhere then
    assert find_ended_without(waits.waits[0], [waits, _status({"1/a": 3}, end=end)]) == []
    assert find_ended_without(waits.waits[0], [waits, _status({"1/a": 2}, ended={"2": end})]) == []


@pytest.mark.parametrize("seed", every(3, range(300)))
def test_whom_it_finds_never_goes_on_and_in_the_end_it_finds_all(seed):
    draw = random.Random(seed)
    size, links = draw.randint(2, 4), ["1/a", "1/b", "1/c"][: draw.randint(1, 3)]
    common = [draw.choice(links) for _ in range(draw.randint(1, 6))]
    programs = []
    for _ in range(size):
        own = list(common)
        if draw.random() < 0.5:
            own.insert(draw.randrange(len(own) + 1), draw.choice(links))
        if draw.random() < 0.5:
            own.pop(draw.randrange(len(own)))
        programs.append(own)
    done = [0] * size  # operations that have ended, of each worker
    waits = [False] * size

    def begun(rank):
        so_far = programs[rank][: done[rank] + waits[rank]]
        return {link: so_far.count(link) for link in links}

    def position(rank):
        counts = begun(rank)
        if waits[rank]:
            link = programs[rank][done[rank]]
            return _status(counts, _wait(link, counts[link]))
        over = done[rank] == len(programs[rank])
        return _status(counts, end=Exit(is_loss=False, words="over") if over else None)

    found = set()
    while True:
        steps = []
        for rank in range(size):
            if waits[rank]:
                link = programs[rank][done[rank]]
                late = [o for o in range(size) if begun(o)[link] < begun(rank)[link]]
                if any(done[o] == len(programs[o]) and not waits[o] for o in late):
                    programs[rank] = programs[rank][: done[rank] + 1]  # an error, and the end
                    steps.append(rank)
                elif not late:
                    steps.append(rank)
            elif done[rank] < len(programs[rank]):
                steps.append(rank)
        assert not found & set(steps)
        found |= set(_ranks([position(rank) for rank in range(size)]))
        if not steps:
            break
        rank = draw.choice(steps)
        done[rank] += waits[rank]
        waits[rank] = not waits[rank]
    assert found == {rank for rank in range(size) if waits[rank]}
