"""A communicator per position: every tensor is reduced where it lies."""

import pytest
import torch

import mirror
from mirror import comm
from mirror.replica.collectives.wrapped_communicators import PerPositionCommunicator
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
        with made.within(3):
            made.abort()


def test_a_communicator_of_ones_own_serves_one_position_alone():
    with FakeGpus(4):
        own = comm.create("naive", ["cuda:0", "cuda:2"])
        with pytest.raises(
            mirror.BackendError, match=r"one communicator per position.*name of a backend"
        ):
            mirror.MirroredStrategy(ROWS, own)
