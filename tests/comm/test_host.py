"""mirror/comm/host.py: the CPU backend has the oracle's bits; test_conformance has the rest."""

import pytest
import torch

from mirror import comm


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("n", [1, 2, 5])
def test_host_and_naive_agree_bit_for_bit(n, dtype):
    shapes = [(0,), (1,), (3, 5), (1000,), (64, 3, 3)]
    lists = [[(torch.randn(shape) * 100).to(dtype) for shape in shapes] for _ in range(n)]
    copies = [[tensor.clone() for tensor in column] for column in lists]
    comm.create("host", ["cpu"] * n).all_reduce_lists(lists, scale=1 / 7)
    comm.create("naive", ["cpu"] * n).all_reduce_lists(copies, scale=1 / 7, bytes_per_pack=100)
    for column, copied in zip(lists, copies, strict=True):
        assert all(map(torch.equal, column, copied))


def test_replicas_are_added_in_their_order():
    # 1e8 swallows a 1 in float32: (1e8 - 1e8) + 1 is 1, (1 - 1e8) + 1e8 is 0.
    for values, expected in (((1e8, -1e8, 1), 1), ((1, -1e8, 1e8), 0)):
        tensors = [torch.tensor([float(value)]) for value in values]
        comm.create("host", ["cpu"] * 3).all_reduce(tensors)
        assert [tensor.item() for tensor in tensors] == [expected] * 3


def test_host_serves_the_cpu_only():
    host = type(comm.create("host", ["cpu"]))
    assert host.unavailable_reason((torch.device("cpu"),) * 3) is None
    assert "CPU" in host.unavailable_reason((torch.device("cuda", 0),))
