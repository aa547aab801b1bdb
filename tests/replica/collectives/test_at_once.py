"""Collectives in the backward pass and buckets: one communicator, several threads."""

from functools import cache

import pytest
import torch
from torch import nn

import mirror
from mirror import comm
from mirror.comm.collective_lock import CollectiveLock
from mirror.errors import CollectiveTimeoutError
from tests.comm.nccl.fake_nccl import MISSING, FakeNccl
from tests.comm.test_collective_lock import Scratch
from tests.pairs import each_once

WIDTH, LAYERS = 160, 5
KERNELS = ("direct", "hierarchical", "ring")
BACKENDS = [*comm.available(["cpu"] * 2), "Scratch", *([] if MISSING else ["nccl"])]
# A bucket is a tensor; a layer (its matrix has 100 KB); two layers; everything.
PACKS = (1, 120_000, 250_000, 25 * 2**20)


class FlatScratch(Scratch):
    """Takes tensors of any shape."""

    def all_reduce(self, tensors, op="sum", scale=1.0):
        super().all_reduce([tensor.view(-1) for tensor in tensors], op, scale)


def make_model(width=WIDTH):
    torch.manual_seed(0)
    layers = [
        layer
        for _ in range(LAYERS)
        for layer in (nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU())
    ]
    return nn.Sequential(*layers)


def batches(num_steps, width=WIDTH):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(14, width, generator=generator) for _ in range(num_steps)]


def one_step(model, optimizer, x):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def train(n, backend, schedule="lockstep", pack=120_000, num_steps=4, width=WIDTH, timeout=60.0):
    """Returns losses and parameters; a step is that of way 3."""
    if backend == "Scratch":
        backend = FlatScratch(["cpu"] * n)
    elif backend == "nccl":
        backend = FakeNccl().communicator(n)
    options = mirror.CommunicationOptions(bytes_per_pack=pack, timeout_seconds=timeout)
    with mirror.MirroredStrategy(
        ["cpu"] * n, backend, communication_options=options, schedule=schedule
    ) as strategy:
        model = strategy.mirror(mirror.nn.convert_sync_batchnorm(make_model(width)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        losses = [
            strategy.reduce("mean", strategy.run(one_step, (model, optimizer, batch)))
            for batch in strategy.distribute_dataset(batches(num_steps, width))
        ]
        strategy.check_replicas()
        return [*losses, *[parameter.detach().clone() for parameter in model.parameters()]]


@cache
def expected(n):
    return train(n, "host", pack=0)


@cache
def expected_on_one_device():
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = [one_step(model, optimizer, x) for x in batches(4)]
    return [*losses, *[parameter.detach() for parameter in model.parameters()]]


def assert_close(got, wanted):
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_host_trains_as_one_device_does():
    assert_close(expected(2), expected_on_one_device())


@each_once(backend=BACKENDS, schedule=["lockstep", "staggered"])
def test_sync_batch_norm_with_buckets_in_flight_trains_as_one_device(backend, schedule):
    got = train(2, backend, schedule)
    assert all(map(torch.equal, got, expected(2)))  # a sum of two has one order
    assert_close(got, expected_on_one_device())


@pytest.mark.slow
@each_once(backend=BACKENDS, schedule=["lockstep", "staggered"], n=[2, 3, 4], pack=PACKS)
def test_all_sizes_of_packs_with_sync_batch_norm_train_as_one_device(backend, schedule, n, pack):
    assert_close(train(n, backend, schedule, pack), expected_on_one_device())


@pytest.mark.parametrize("backend", [name for name in KERNELS if name in BACKENDS][:1])
def test_without_turns_the_training_is_wrong(backend, monkeypatch):
    monkeypatch.setattr(CollectiveLock, "call", lambda self, collective, devices: collective())
    wanted = train(2, "host", width=600, num_steps=3)
    for _ in range(5):
        try:
            got = train(2, backend, width=600, num_steps=3, pack=1 << 20, timeout=0.3)
        except CollectiveTimeoutError:
            return
        if not all(map(torch.equal, got, wanted)):
            return
    pytest.fail("no check found that the lock is gone")
