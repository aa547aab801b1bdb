"""Communicators of a user's own, and the tree of errors."""

import copy

import torch
from torch import nn

import mirror
from tests.oracle import assert_same


def test_a_communicator_of_the_users_own_is_used(make_strategy):
    calls = []

    class Slow(mirror.comm.Communicator):
        def all_reduce(self, tensors, op="sum", scale=1.0):
            calls.append(len(tensors))
            assert op == "sum"
            total = torch.stack(list(tensors)).sum(0)
            if scale != 1.0:
                total *= scale
            for t in tensors:
                t.copy_(total)

        def broadcast(self, tensors, root=0):
            for t in tensors:
                t.copy_(tensors[root])

        def reduce_scatter(self, tensors, op="sum"):
            raise NotImplementedError

        def all_gather(self, tensors):
            raise NotImplementedError

        @classmethod
        def unavailable_reason(cls, devices):
            return None

        def close(self):
            calls.append("closed")

    devices = [torch.device("cpu")] * 3
    strategy = make_strategy(3, backend=Slow(devices))
    plain = nn.Linear(2, 2)
    model = strategy.mirror(copy.deepcopy(plain))
    for m in (plain, model):
        m(torch.ones(7, 2) * torch.arange(7.0)[:, None]).square().mean().backward()
    assert_same(model.weight.grad, plain.weight.grad)
    assert 3 in calls


def test_the_error_tree():
    tree = {
        "DeviceError": ValueError,
        "BackendError": RuntimeError,
        "StrategyError": RuntimeError,
        "StructureError": ValueError,
        "BatchError": ValueError,
        "ShapeError": ValueError,
        "DivergenceError": RuntimeError,
        "CollectiveTimeoutError": TimeoutError,
        "ReplicaMismatchError": RuntimeError,
    }
    for name, base in tree.items():
        error = getattr(mirror, name)
        assert issubclass(error, mirror.MirrorError)
        assert issubclass(error, base)
