"""Partitioners: TensorFlow's numbers of pieces."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mirror.server.partitioners import FixedShards, MaxSize, MinSize, num_pieces

SHAPES = st.lists(st.integers(0, 40), min_size=1, max_size=3).map(tuple)


@pytest.mark.parametrize(
    ("partitioner", "shape", "pieces"),
    [
        (FixedShards(2), (10, 3), [2, 1]),
        (FixedShards(8), (3, 3), [3, 1]),
        (FixedShards(1), (3,), [1]),
        (FixedShards(2), (), []),
        (MinSize(4, 2), (6, 1), [2, 1]),
        (MinSize(4, 10), (6, 1), [6, 1]),
        (MinSize(8, 10), (5, 1), [3, 1]),
        (MinSize(), (10_000_000,), [1]),
        (MinSize(1 << 20, 10), (3, 3), [1, 1]),
        (MaxSize(4), (6, 1), [6, 1]),
        (MaxSize(4, 2), (6, 1), [2, 1]),
        (MaxSize(1024), (6, 1), [1, 1]),
        (MaxSize(10), (6, 1), [3, 1]),
        (MaxSize(1), (6, 100), [6, 1]),
    ],
)
def test_numbers_are_those_of_tensorflow(partitioner, shape, pieces):
    assert partitioner(shape, torch.float32) == pieces


@given(
    SHAPES, st.integers(1, 500), st.integers(1, 9), st.sampled_from([torch.float64, torch.int8])
)
def test_pieces_keep_their_limits(shape, limit, most, dtype):
    row_bytes = math.prod(shape[1:]) * dtype.itemsize
    for partitioner in FixedShards(most), MinSize(limit, most), MaxSize(limit, most):
        count = num_pieces(partitioner, "w", shape, dtype)
        assert 1 <= count <= max(1, min(most, shape[0]))
    count = num_pieces(MaxSize(limit), "w", shape, dtype)
    largest = -(-shape[0] // count) * row_bytes
    assert largest <= limit or row_bytes > limit or shape[0] <= count


@pytest.mark.parametrize("returned", [[1, 2], [2], [0, 1], "2", [1.5, 1], None, True])
def test_what_a_users_partitioner_may_not_return(returned):
    with pytest.raises(ValueError, match=r"it has returned|for w of shape"):
        num_pieces(lambda shape, dtype: returned, "w", (4, 4), torch.float32)


def test_a_users_partitioner_may_return_a_number():
    assert num_pieces(lambda shape, dtype: 3, "w", (4, 4), torch.float32) == 3
    assert num_pieces(lambda shape, dtype: [9, 1], "w", (4, 4), torch.float32) == 4


@pytest.mark.parametrize(
    "make",
    [lambda: FixedShards(0), lambda: MinSize(0), lambda: MinSize(4, -1), lambda: MaxSize(True)],
)
def test_numbers_that_are_not_positive_are_refused(make):
    with pytest.raises(ValueError, match="must be an integer from 1 on"):
        make()
