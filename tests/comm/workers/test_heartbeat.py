"""Board: what a worker says of itself, and how it leaves; a fork of it says nothing."""

import os
import threading
import time

import pytest
from torch.distributed import HashStore, PrefixStore  # type: ignore[attr-defined]

from mirror.comm.workers import heartbeat as board_file
from mirror.comm.workers.heartbeat import HeartbeatStore
from mirror.comm.workers.worker_status import Exit, WorkerStatus
from tests.interrupts.test_forks import in_child

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


def said(store, rank=1):
    return WorkerStatus.from_json(store.get(str(rank)))


def test_an_end_is_said_at_once_and_stays_the_first(make, store):
    board, links = make(), Links()
    number = board.number()
    board.keep(number, links)
    assert board.end(number, OVER).wait(SECONDS)
    assert said(store).ended == {number: OVER}
    assert said(store).num_open == 0
    assert board.end(number, Exit(is_loss=True, words="lost")).wait(SECONDS)
    assert said(store).ended == {number: OVER}


def test_who_leaves_ends_the_strategies_that_are_there(make, store):
    board, links, gone = make(), Links(), Links()
    board.keep("1", links)
    board.keep("2", gone)
    del gone
    board.deregister()
    board.deregister()
    (end,) = links.ends
    assert said(store).end == end == Exit(is_loss=False, words="has left its program")
    assert board.end("1", end).is_set()  # nobody says it any more, and nobody waits for that


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks")
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_fork_is_no_worker_and_waits_for_nobody(make):
    board, links = make(), Links()
    board.keep("1", links)

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
