"""Which calls split their arguments over the replicas."""

import copy
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import mirror
from mirror.errors import StrategyError
from tests.gpu.fake import FakeGpus
from tests.oracle import assert_same


def test_submodules_of_an_unsplit_call_do_not_split(make_strategy):
    # A call without a tensor runs whole, but each inner module split its input again: attention
    # over the first dimension gave wrong outputs.
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.eye(2))

        def forward(self, x):
            return torch.softmax(x @ self.weight @ x.T, -1) @ x

    class Generator(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = Attention()

        def forward(self, n):
            return self.attention(torch.arange(2.0 * n).view(n, 2) / 4)

    with make_strategy(2).scope():
        model = Generator()
    assert_same(model(4), Generator()(4))


@pytest.mark.parametrize("n", [6, 7, 2])
def test_arrays_that_forward_returns_or_keeps_are_joined_or_per_replica(n, make_strategy):
    # Comparing them raised "The truth value of an array is ambiguous".
    class Arrays(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(2, 3)
            self.seen = np.zeros((1, 3))

        def forward(self, x):
            y = self.linear(x)
            self.seen = y.detach().numpy()
            return y, self.seen, np.arange(3), self.seen.mean(0)

    plain = Arrays()
    model = make_strategy(3).mirror(copy.deepcopy(plain))
    x = torch.randn(n, 2)
    (_, seen, constant, means), (expected, _, _, _) = model(x), plain(x)
    np.testing.assert_allclose(seen, expected.detach().numpy(), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(constant, np.arange(3))
    assert isinstance(means, mirror.PerReplica)
    np.testing.assert_allclose(model.seen, seen)


@contextmanager
def noted_copies():
    """Gives the shapes that were pinned, and those copied to GPUs while the host waited."""
    to, pin = Tensor.to, Tensor.pin_memory
    pinned, awaited = [], []

    def noting_to(tensor, *args, **kwargs):
        moved = to(tensor, *args, **kwargs)
        is_host = tensor.device.type == "cpu" and moved.device.type == "cuda"
        if is_host and not (kwargs.get("non_blocking") and tensor.is_pinned()):
            awaited.append(tuple(tensor.shape))
        return moved

    def noting_pin(tensor):
        pinned.append(tuple(tensor.shape))
        return pin(tensor)

    with (
        mock.patch.object(Tensor, "to", noting_to),
        mock.patch.object(Tensor, "pin_memory", noting_pin),
    ):
        yield pinned, awaited


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x, scale, extra=None):
        assert extra is None or extra["mask"].device == x.device
        return self.layer(x) * scale


@pytest.mark.parametrize("n", [1, 2, 4])
def test_no_replica_waits_for_the_copy_of_a_batch_of_the_host(n):
    # Each waited for all earlier work of its GPU, and the next one began after that: N GPUs went
    # one after the other.
    plain = Scaled()
    x, scale, mask = torch.randn(8, 4), torch.tensor(2.0), torch.ones(8, 1)
    with FakeGpus(n) as gpus:
        strategy = mirror.MirroredStrategy(gpus.devices, backend="naive")
        model = strategy.mirror(copy.deepcopy(plain))
        model(x, scale, extra={"mask": mask})  # and is compared with one device
        for _ in range(3):
            with noted_copies() as (pinned, awaited):
                out = model(x, scale, extra={"mask": mask})
            assert awaited == []
            assert sorted(pinned) == [(), (8, 1), (8, 4)]  # once for all parts
            assert_same(out.to("cpu"), plain(x, scale))
        strategy.close()


def test_a_batch_of_the_host_that_needs_a_gradient_gets_it():
    plain = Scaled()
    with FakeGpus(2) as gpus:
        strategy = mirror.MirroredStrategy(gpus.devices, backend="naive")
        model = strategy.mirror(copy.deepcopy(plain))
        x, expected = (torch.ones(6, 4, requires_grad=True) for _ in range(2))
        model(x, torch.tensor(2.0)).sum().backward()
        plain(expected, torch.tensor(2.0)).sum().backward()
        assert_same(x.grad, expected.grad)
        strategy.close()


@pytest.mark.parametrize("n", [1, 2])
def test_memory_that_the_caller_has_pinned_may_be_written_to_after_the_call(n):
    with FakeGpus(n) as gpus:
        strategy = mirror.MirroredStrategy(gpus.devices, backend="naive")
        model = strategy.mirror(Scaled())
        x = torch.ones(8, 4).pin_memory()
        for i in range(3):
            model(x, torch.tensor(2.0))
            x.fill_(i)
        strategy.close()


class Changing(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x, table, scalar, times=1):
        if times < 0:
            raise ValueError("times")
        x.add_(times)
        out = self.layer(x)
        return out, out.mean(), x, SimpleNamespace(table=table, scalar=scalar)


def calls_of_an_only_replica():
    with mirror.MultiWorkerMirroredStrategy(["cpu"]) as strategy:
        model = strategy.mirror(Changing())
        x, table, scalar = torch.zeros(3, 2), torch.arange(4), torch.tensor(2.0)
        out, loss, same, held = model(x, table, scalar, times=2)
        with pytest.raises(ValueError, match="times") as caught:
            model(x, table, scalar, times=-1)
        with pytest.raises(StrategyError, match="an iterator"):
            model(x, iter([1]), scalar)
        plain, one = strategy.mirror(nn.Linear(2, 2)), torch.ones(5, 2)
        return {
            "changed": x.tolist(),
            "same": same is x and held.table is table and held.scalar is scalar,
            "loss": type(loss) is torch.Tensor and bool(loss == out.mean()),
            "notes": "".join(caught.value.__notes__),
            "plain": plain(one).shape,
            "none": plain(one[:0]).shape,
            "distributed": plain(mirror.PerReplica([one])).shape,
            "listed": [part.shape for part in strategy.mirror(Listing())([one, {"a": one}])],
        }


class Listing(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, parts):
        first, rest = parts
        return [first * self.weight, rest["a"] * self.weight]


def test_the_only_replica_of_a_worker_has_the_arguments_themselves(worker_pool):
    for found in worker_pool(2).run(calls_of_an_only_replica):
        assert found["changed"] == [[2.0, 2.0]] * 3
        assert found["same"]
        assert found["loss"]
        assert "argument 0 of shape (3, 2) went as (3, 2)" in found["notes"]
        assert found["plain"] == (5, 2)
        assert found["none"] == (0, 2)
        assert found["distributed"] == (5, 2)
        assert found["listed"] == [(5, 2), (5, 2)]


class Sum(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x, y):
        return (x + y) * self.weight


def test_how_a_loader_has_split_one_argument_decides_for_the_others(make_strategy):
    model, x = make_strategy(2).mirror(Sum()), torch.arange(5.0)
    parts = mirror.PerReplica([x[:1], x[1:]])
    assert_same(model(parts, 10 * x), 11 * x)
    assert_same(model(parts, y=10 * x), 11 * x)


def test_a_loss_that_has_a_buffer_is_not_split(make_strategy):
    # The mean of two weighted means is not that of all examples.
    plain = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 9.0]))
    outputs, targets = torch.randn(5, 2), torch.tensor([0, 0, 1, 0, 1])
    loss = make_strategy(2).mirror(copy.deepcopy(plain))
    assert_same(loss(outputs, targets), plain(outputs, targets))
