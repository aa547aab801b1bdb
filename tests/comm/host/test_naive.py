"""mirror/comm/host/naive.py: the oracle itself, on values one can check in the head."""

import pytest
import torch

from mirror import comm


@pytest.mark.parametrize(("op", "expected"), [("sum", 9), ("min", 2), ("max", 4), ("prod", 24)])
def test_each_op_on_2_3_4(op, expected):
    tensors = [torch.full((3,), value) for value in (2, 3, 4)]
    comm.create("naive", ["cpu"] * 3).all_reduce(tensors, op)
    assert [tensor.tolist() for tensor in tensors] == [[expected] * 3] * 3


def test_integers_wrap_around():
    tensors = [torch.full((1,), 200, dtype=torch.uint8) for _ in range(2)]
    comm.create("naive", ["cpu"] * 2).all_reduce(tensors)
    assert tensors[0].item() == 400 - 256


def test_scatter_and_gather_cut_like_tensor_split():
    communicator = comm.create("naive", ["cpu"] * 2)
    tensors = [torch.tensor([1, 2, 3]), torch.tensor([10, 20, 30])]
    communicator.reduce_scatter(tensors)
    assert tensors[0][:2].tolist() == [11, 22]
    assert tensors[1][2:].tolist() == [33]
    communicator.all_gather(tensors)
    assert [tensor.tolist() for tensor in tensors] == [[11, 22, 33]] * 2
