"""Several workers: what they say to each other arrives, and who is at something else is named."""

import math

import pytest
import torch

from mirror.comm.workers.distributed_group import DistributedWorkerGroup
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


def told():
    workers = _workers()
    first = workers.all_gather_int("one", 10 + workers.rank)
    second = workers.all_gather_int("another", -workers.rank)
    return second(), first(), workers.exchange("something else")


def test_numbers_are_told_beside_what_is_exchanged(worker_pool):
    assert worker_pool(2).run(told) == [([0, -1], [10, 11], [b"", b""])] * 2
