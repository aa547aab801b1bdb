"""Groups of workers: messages arrive, mismatches are named, and the last use ends a group."""

import math
import weakref
from types import SimpleNamespace

import pytest
import torch

from mirror.comm.workers.checked_gather import ENVELOPE_BYTES, Envelope
from mirror.comm.workers.distributed_group import DistributedWorkerGroup, SequencedGroup
from mirror.errors import DivergenceError


def _workers(num_local=1):
    return DistributedWorkerGroup(num_local, lambda: "here.py:1", 20.0)


def talk():
    workers = _workers()
    own = [torch.full((workers.rank + 1,), 2.5, dtype=torch.bfloat16), torch.zeros(0, 2)]
    parcels = workers.exchange_tensors("talk", "same", own, [float("nan"), workers.rank])
    long = workers.exchange("long", None, lambda: b"x" * (workers.rank * 5000))
    first = torch.full((4,), float(workers.rank)), torch.tensor([bool(workers.rank)])
    workers.broadcast("first", first)
    return (
        [([t.tolist() for t in p.tensors], p.numbers) for p in parcels],
        [len(said) for said in long],
        [t.tolist() for t in first],
    )


def test_what_each_says_comes_to_all(worker_pool):
    for parcels, lengths, first in worker_pool(2).run(talk):
        for rank, (tensors, numbers) in enumerate(parcels):
            assert tensors == [[2.5] * (rank + 1), []]
            assert math.isnan(numbers[0])
            assert numbers[1] == rank
        assert lengths == [0, 5000]
        assert first == [[0.0] * 4, [False]]


def disagree(by):
    workers = _workers()
    with pytest.raises(DivergenceError, match=r"worker 0 of 2: (.|\n)*worker 1 of 2: ") as caught:
        if by == "shape":
            workers.exchange_tensors("sum", [3 + workers.rank], [torch.ones(3 + workers.rank)])
        else:
            workers.exchange(f"operation {workers.rank}")
    return str(caught.value)


@pytest.mark.parametrize("by", ["shape", "operation"])
def test_who_is_at_something_else_is_named_on_all(worker_pool, by):
    messages = worker_pool(2).run(disagree, by)
    assert messages[0] == messages[1]
    assert "here.py:1" in messages[0]


def gather_ints():
    workers = _workers()
    first = workers.all_gather_int("one", 10 + workers.rank)
    second = workers.all_gather_int("another", -workers.rank)
    return second(), first(), workers.exchange("something else")


def test_numbers_are_told_beside_what_is_exchanged(worker_pool):
    assert worker_pool(2).run(gather_ints) == [([0, -1], [10, 11], [b"", b""])] * 2


KEY = bytes(range(8))


@pytest.mark.parametrize(
    "words",
    [
        "",
        "all_reduce at train.py:12",
        "x" * 1000,
        "\u00e9" * 300,
        "x" + "\u00e9" * 300,
        "xx" + "\u5b57" * 300,
    ],
    ids=["none", "short", "cut", "cut-between", "cut-within-2", "cut-within-3"],
)
def test_what_is_sealed_is_opened_at_every_length(words):
    fitting = []
    for length in range(ENVELOPE_BYTES + 2):
        envelope = Envelope.from_payload(KEY, words, b"\x01" * length)
        sealed = envelope.to_bytes()
        assert len(sealed) == ENVELOPE_BYTES
        assert Envelope.from_bytes(bytes(sealed)) == envelope
        fitting.append(envelope.payload is not None)
    assert words.startswith(envelope.words)
    assert fitting == sorted(fitting, reverse=True)
    assert sum(fitting) == ENVELOPE_BYTES - 18 - len(envelope.words.encode()) + 1


class Group:
    """Stands for a process group."""


class Work:
    """Stands for an operation of one."""

    def __init__(self, is_done):
        self._is_done = is_done

    def is_completed(self):
        return self._is_done


@pytest.mark.parametrize(
    ("done", "forgets", "is_kept"),
    [
        ([], False, False),
        ([True, True], False, False),
        ([True, False], False, True),
        ([True], True, True),  # in a forked process
    ],
)
def test_a_group_is_let_go_where_nobody_waits_for_it(done, forgets, is_kept):
    link = SequencedGroup("1/main", SimpleNamespace(started={}))
    link.process_group = Group()
    group = weakref.ref(link.process_group)
    works = []
    for is_done in done:
        work, _ = link.start("a sum", lambda group, is_done=is_done: Work(is_done))
        works.append(weakref.ref(work))
        del work
    link.drop(leak=forgets)
    assert [each() is not None for each in (group, *works)] == [is_kept] * (1 + len(done))
