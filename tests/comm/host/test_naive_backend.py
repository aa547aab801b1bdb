"""mirror/comm/host/naive_backend.py: the oracle itself, on values one can check in the head."""

import pytest
import torch

from mirror import comm
from mirror.errors import ShapeError


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


@pytest.mark.parametrize("collective", ["all_reduce", "broadcast", "reduce_scatter", "all_gather"])
def test_every_collective_looks_at_its_tensors_first(collective):
    call = getattr(comm.create("naive", ["cpu"] * 2), collective)
    shared = torch.arange(6.0)
    with pytest.raises(ShapeError, match="share memory"):
        call([shared[:4], shared[2:]])
    with pytest.raises(ShapeError, match="shape"):
        call([torch.ones(2), torch.ones(3)])
    assert torch.equal(shared, torch.arange(6.0))


def test_lists_of_tensors_are_looked_at_first():
    communicator = comm.create("naive", ["cpu"] * 2)
    first = torch.ones(2)
    for other in (torch.ones(3), torch.ones(2, dtype=torch.float64)):
        with pytest.raises(ShapeError, match="replica 1 at 1 has"):
            communicator.all_reduce_lists([[torch.ones(1), first], [torch.ones(1), other]])
    assert first.tolist() == [1, 1]
