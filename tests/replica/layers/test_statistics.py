"""SyncBatchNorm: digits, dtypes, cost, and what it refuses."""

import copy

import pytest
import torch
from torch import nn

import mirror
from mirror.nn import SyncBatchNorm, convert_sync_batchnorm
from tests.oracle import assert_same, train
from tests.replica.layers.normalized import (
    REPLICAS,
    WAYS,
    CountingCommunicator,
    batches,
    pair,
    randomize,
    weighted_loss,
)

# Numbers


def test_a_large_mean_costs_no_digits(make_strategy):
    x = torch.randn(64, 3) + 1e4
    model = make_strategy(4).mirror(SyncBatchNorm(3, momentum=1.0))
    model(x)
    torch.testing.assert_close(model.running_var.double(), x.double().var(0), rtol=1e-4, atol=0.0)


@pytest.mark.parametrize("weights", [None, torch.float32], ids=["all half", "mixed"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(make_strategy, dtype, weights):
    plain = randomize(nn.BatchNorm2d(3)).to(weights or dtype)
    model = pair(make_strategy(3), plain)
    x = (torch.randn(8, 3, 4, 4) * 2 + 50).to(dtype)
    target = torch.randn(8, 3, 4, 4)
    inputs = x.clone().requires_grad_(), x.clone().requires_grad_()
    outputs = model(inputs[0]), plain.float()(inputs[1].float())
    for output in outputs:
        (output.float() * target).sum().backward()
    assert outputs[0].dtype == inputs[0].grad.dtype == dtype
    # All that is lost is lost in the last rounding.
    bound = 2 * torch.finfo(dtype).eps
    assert_same(outputs[0], outputs[1].to(dtype), "output", bound)
    assert_same(inputs[0].grad, inputs[1].grad, "input gradient", bound)
    assert_same(model.running_var.float(), plain.running_var, "running_var", bound)


def test_autocast_gives_the_dtype_of_batch_norm(make_strategy):
    plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1))
    model = pair(make_strategy(3), plain)
    x = torch.randn(7, 3, 6, 6)
    with torch.autocast("cpu", torch.bfloat16):
        assert_same(model(x), plain(x))


@pytest.mark.parametrize("size", [(7, 3, 4, 5), (7, 3, 2, 4, 5)])
def test_channels_last_is_kept(make_strategy, size):
    layout = torch.channels_last if len(size) == 4 else torch.channels_last_3d
    plain = randomize(nn.BatchNorm3d(3) if len(size) == 5 else nn.BatchNorm2d(3))
    model = make_strategy(2).mirror(convert_sync_batchnorm(copy.deepcopy(plain)))
    x = torch.randn(size).to(memory_format=layout).requires_grad_()
    output = model(x)
    output.square().sum().backward()
    assert output.is_contiguous(memory_format=layout)
    assert x.grad.is_contiguous(memory_format=layout)
    assert_same(output, plain(x))


def test_replicas_keep_equal_bits(make_strategy):
    strategy = make_strategy(3)
    model = strategy.mirror(SyncBatchNorm(3))
    ((x, _),) = batches([7], (3,))
    (batch,) = strategy.distribute_dataset([x])

    def step(x):
        model(x).square().mean().backward()
        return [b.clone() for b in (model.running_mean, model.running_var, model.weight.grad)]

    first, *others = strategy.local_results(strategy.run(step, args=(batch,)))
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


# Cost


@pytest.mark.parametrize("way", WAYS)
def test_each_layer_communicates_once_forward_and_once_backward(way):
    communicator = CountingCommunicator([torch.device("cpu")] * 3)
    with mirror.MirroredStrategy(["cpu"] * 3, backend=communicator) as strategy:
        model = nn.Sequential(nn.Linear(4, 4), SyncBatchNorm(4), nn.ReLU(), SyncBatchNorm(4))
        strategy.mirror(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        train(way, strategy, model, optimizer, batches([7], (4,)), weighted_loss)
    table = 3 * (2 * 4 + 1)
    passes = 2 if way == 3 else 1  # a backward pass outside run goes through one thread
    assert communicator.sizes.count(table) == 2 * passes
    assert len(communicator.sizes) == 2 * passes + 1  # and one for all gradients


# Errors


@pytest.mark.parametrize("n", REPLICAS)
def test_one_value_per_channel_in_the_whole_batch_is_refused(make_strategy, n):
    strategy = make_strategy(n)
    model = strategy.mirror(SyncBatchNorm(3))
    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
        model(torch.randn(1, 3))
    assert model(torch.randn(2, 3)).shape == (2, 3)


def test_one_value_beside_empty_parts_is_refused(make_strategy):
    strategy = make_strategy(2)
    model = strategy.mirror(SyncBatchNorm(3))
    parts = mirror.PerReplica([torch.randn(1, 3), torch.randn(0, 3)])
    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
        strategy.run(model, args=(parts,))
    assert model.num_batches_tracked == 0


def test_one_value_on_each_replica_is_enough(make_strategy):
    plain = nn.BatchNorm1d(3)
    model = pair(make_strategy(2), plain)
    x = torch.randn(2, 3)
    assert_same(model(x), plain(x))


@pytest.mark.parametrize("n", [1, 2])
def test_one_dimension_is_refused(make_strategy, n):
    model = make_strategy(n).mirror(SyncBatchNorm(3))
    with pytest.raises(ValueError, match="expected at least 2D input"):
        model(torch.randn(3))


def test_a_replica_that_skips_the_layer_diverges(make_strategy):
    strategy = make_strategy(2)
    model = strategy.mirror(SyncBatchNorm(3))

    def step():
        if mirror.get_replica_context().replica_id_in_sync_group == 0:
            model(torch.randn(2, 3))

    with pytest.raises(mirror.DivergenceError):
        strategy.run(step)
