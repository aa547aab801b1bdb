"""Which communicators are watched, and what a collective that is broken off says."""

import pytest
import torch

import mirror
from mirror import comm
from mirror.replica.collectives.wrapped_communicators import TimeoutCommunicator
from tests.faults.communicators import Faulty

CPUS = ["cpu"] * 3


def communicator_of(backend, seconds):
    options = mirror.CommunicationOptions(timeout_seconds=seconds)
    strategy = mirror.MirroredStrategy(CPUS, backend, communication_options=options)
    return strategy._group.replicas.communicator


def test_those_with_a_timeout_that_keep_none_themselves_are_watched():
    mine = Faulty(CPUS)
    assert communicator_of(mine, None) is mine
    assert type(communicator_of("auto", None)) is type(comm.create("host", CPUS))
    assert type(communicator_of("direct", 9)) is type(comm.create("direct", CPUS))
    for backend in (mine, "auto", "host", "naive"):
        assert isinstance(communicator_of(backend, 9), TimeoutCommunicator)


def test_a_watched_one_looks_and_acts_like_what_it_watches():
    inner = comm.create("naive", CPUS)
    watched = TimeoutCommunicator(inner, 20)
    for name in ("name", "deterministic", "waits", "packs", "devices"):
        assert getattr(watched, name) == getattr(inner, name)
    assert repr(watched) == repr(inner)
    sums = {
        "all_reduce": lambda made, tensors: made.all_reduce(tensors, "sum", 0.5),
        "all_reduce_lists": lambda made, tensors: made.all_reduce_lists([[t] for t in tensors]),
        "all_reduce_checked": lambda made, tensors: made.all_reduce_checked(
            [[t] for t in tensors], "sum", 1.0, 0
        ),
        "broadcast": lambda made, tensors: made.broadcast(tensors, 1),
        "all_gather": lambda made, tensors: made.all_gather(tensors),
        "reduce_scatter": lambda made, tensors: made.reduce_scatter(tensors),
    }
    for name, act in sums.items():
        results = []
        for made in (watched, inner):
            tensors = [torch.full((6,), float(r)) for r in range(3)]
            act(made, tensors)
            results.append(torch.stack(tensors))
        assert torch.equal(*results), name
    watched.close()
    with pytest.raises(mirror.BackendError, match="closed"):
        inner.all_reduce([torch.ones(1) for _ in CPUS])


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (lambda made, row: made.all_reduce(row), "all_reduce of int64 [2, 3] over"),
        (lambda made, row: made.all_gather(row), "all_gather of int64 [2, 3] over"),
        (lambda made, row: made.broadcast(row, 1), "broadcast of int64 [2, 3] over"),
        (
            lambda made, row: made.all_reduce_lists([[t] * 6 for t in row]),
            "all_reduce of int64 [2, 3], int64 [2, 3], int64 [2, 3], int64 [2, 3] and 2 more over",
        ),
    ],
)
def test_the_error_says_what_of(act, said):
    inner = Faulty(CPUS)
    inner.all_reduce_lists = lambda lists, *rest: inner.all_reduce(lists[0])
    inner.arm("hangs", 0)
    row = [torch.ones((2, 3), dtype=torch.int64) for _ in CPUS]
    watched = TimeoutCommunicator(inner, 0.05)
    with pytest.raises(mirror.CollectiveTimeoutError) as caught:
        act(watched, row)
    assert str(caught.value).startswith(
        f"{said} 3 replicas (cpu, cpu, cpu) by the backend 'Faulty' did not end within"
    )
