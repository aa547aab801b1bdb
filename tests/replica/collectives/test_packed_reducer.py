"""mirror/replica/collectives/packed_reducer.py: where lists of gradients are reduced."""

import pytest
import torch

import mirror
from mirror.replica.collectives.packed_reducer import Reducer


def columns_of(n):
    return [[torch.full((3, 2), float(r)), torch.ones(5), torch.ones(400)] for r in range(n)]


def reduced(backend, columns, wire_dtype=None, bytes_per_pack=100):
    """Returns what was moved and then reduced."""
    with mirror.MirroredStrategy(["cpu"] * len(columns), backend) as strategy:
        reducer = Reducer(strategy._group.replicas, bytes_per_pack, wire_dtype)
        moved = reducer.move(columns, None)
        reducer.all_reduce(moved, 0.5)
        return moved


@pytest.mark.parametrize(
    ("backend", "wire_dtype", "bytes_per_pack", "staying"),
    [
        ("naive", None, 100, [2]),
        ("naive", None, 2**20, []),
        ("naive", None, 0, [0, 1, 2]),
        ("naive", torch.bfloat16, 100, [0, 1, 2]),
        ("host", None, 100, [0, 1, 2]),
    ],
)
@pytest.mark.parametrize("n", [2, 3])
def test_what_shares_a_pack_is_moved_and_all_is_reduced_in_its_place(
    n, backend, wire_dtype, bytes_per_pack, staying
):
    columns = columns_of(n)
    before = [list(column) for column in columns]
    moved = reduced(backend, columns, wire_dtype, bytes_per_pack)
    assert list(moved.staying) == staying
    total = sum(range(n)) / 2
    for column, old in zip(columns, before, strict=True):
        assert [i for i, (a, b) in enumerate(zip(column, old, strict=True)) if a is b] == staying
        assert torch.equal(column[0], torch.full((3, 2), total))
        assert torch.equal(column[1], torch.full((5,), n / 2))
        assert torch.equal(column[2], torch.full((400,), n / 2))


def test_every_replica_has_buffers_of_its_own():
    moved = reduced("naive", columns_of(3))
    addresses = {buffer.data_ptr() for mine in moved.buffers for buffer in mine}
    assert len(addresses) == 3
