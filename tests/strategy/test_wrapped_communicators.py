"""Communicators per position, and communicators with a timeout."""

import pytest
import torch

import mirror
from mirror import comm
from mirror.strategy.wrapped_communicators import (
    PerPositionCommunicator,
    TimeoutCommunicator,
)
from tests.faults.communicators import Faulty
from tests.gpu.fake import FakeGpus

ROWS = ["cuda:0", "cuda:1"], ["cuda:2", "cuda:3"]


@pytest.fixture
def placed():
    with FakeGpus(4):
        yield PerPositionCommunicator(
            [comm.create("naive", column) for column in zip(*ROWS, strict=True)]
        )


def tensors(k, size=4):
    """Returns a tensor of each replica, at position k: full of r + 1."""
    return [torch.full((size,), r + 1.0, device=row[k]) for r, row in enumerate(ROWS)]


CHUNK = [1.0, 1.0, 2.0, 2.0]


@pytest.mark.parametrize("k", [0, 1])
@pytest.mark.parametrize(
    ("collective", "expected"),
    [
        (lambda made, of: made.all_reduce(of, "sum", 0.5), [[1.5] * 4] * 2),
        (lambda made, of: made.broadcast(of, 1), [[2.0] * 4] * 2),
        (lambda made, of: made.all_gather(of), [CHUNK] * 2),
        (lambda made, of: made.all_reduce_lists([[t] for t in of], "max"), [[2.0] * 4] * 2),
    ],
)
def test_a_collective_is_between_the_devices_of_one_position(placed, k, collective, expected):
    mine = tensors(k)
    collective(placed, mine)
    assert [t.tolist() for t in mine] == expected
    assert [str(t.device) for t in mine] == [row[k] for row in ROWS]


def test_chunks_of_a_reduction_are_scattered_at_one_position(placed):
    mine = tensors(1)
    placed.reduce_scatter(mine)
    assert mine[0][:2].tolist() == mine[1][2:].tolist() == [3.0, 3.0]


@pytest.mark.parametrize("bytes_per_pack", [0, 2**20])
@pytest.mark.parametrize("checked", [True, False])
def test_lists_may_hold_tensors_of_all_positions(placed, checked, bytes_per_pack):
    rows = [tensors(k, size) for k, size in ((1, 2), (0, 3), (1, 4), (0, 1))]
    columns = [list(column) for column in zip(*rows, strict=True)]
    if checked:
        placed.all_reduce_checked(columns, "sum", 2.0, bytes_per_pack)
    else:
        placed.all_reduce_lists(columns, "sum", 2.0, bytes_per_pack)
    assert all(t.unique().tolist() == [6.0] for row in rows for t in row)


def test_bad_lists_and_strangers_are_refused_as_by_any_other(placed):
    with pytest.raises(mirror.errors.ShapeError, match="equal length"):
        placed.all_reduce_lists([tensors(0), []])
    with pytest.raises(mirror.DeviceError, match="cpu"):
        placed.all_reduce([torch.ones(1), torch.ones(1)])
    with pytest.raises(mirror.DeviceError):
        placed.all_reduce([torch.ones(1, device="cuda:1"), torch.ones(1, device="cuda:2")])
    placed.close()
    with pytest.raises(mirror.BackendError, match="closed"):
        placed.all_reduce(tensors(1))


def test_it_is_called_what_its_parts_are_and_sums_as_they_do():
    with FakeGpus(4):
        parts = [comm.create(n, d) for n, d in (("naive", ROWS[0]), ("naive", ROWS[1]))]
        made = PerPositionCommunicator(parts)
        assert (made.name, made.deterministic, made.waits) == ("naive", True, False)
        assert not made.packs
        made.prepare([("sum", torch.float32)])
        with made.setting_timeout(3):
            made.abort()


def test_a_communicator_of_ones_own_serves_one_position_alone():
    with FakeGpus(4):
        own = comm.create("naive", ["cuda:0", "cuda:2"])
        with pytest.raises(
            mirror.BackendError, match=r"one communicator per position.*name of a backend"
        ):
            mirror.MirroredStrategy(ROWS, own)


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
