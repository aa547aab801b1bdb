"""SyncBatchNorm: digits, dtypes, cost, refusals, and the conversion to it."""

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


def test_one_value_with_empty_parts_is_refused(make_strategy):
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


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.BatchNorm1d(3, eps=0.01, momentum=None)
        self.body = nn.Sequential(
            nn.BatchNorm2d(3, affine=False),
            nn.BatchNorm3d(3, track_running_stats=False),
            nn.SyncBatchNorm(3, process_group="a group"),
        )
        self.again = self.first
        self.other = nn.InstanceNorm1d(3)


@pytest.mark.parametrize("mirrored", [False, True])
def test_conversion_keeps_everything_but_the_class(make_strategy, mirrored):
    model = Net()
    model.body[0].eval()
    calls = []
    model.first.register_forward_hook(lambda *_: calls.append("hook"))
    if mirrored:
        make_strategy(2).mirror(model)
    layers = [model.first, *model.body]
    before = [dict(layer.named_parameters()) | dict(layer.named_buffers()) for layer in layers]
    keys, modes = list(model.state_dict()), [layer.training for layer in layers]
    assert convert_sync_batchnorm(model) is model
    assert [model.first, *model.body] == layers
    assert [type(layer) for layer in layers] == [SyncBatchNorm] * 4
    for layer, tensors in zip(layers, before, strict=True):
        after = dict(layer.named_parameters()) | dict(layer.named_buffers())
        assert {k: id(t) for k, t in after.items()} == {k: id(t) for k, t in tensors.items()}
    assert list(model.state_dict()) == keys
    assert [layer.training for layer in layers] == modes
    assert (model.first.eps, model.first.momentum) == (0.01, None)
    assert not hasattr(model.body[2], "process_group")
    assert model.again is model.first
    assert type(model.other) is nn.InstanceNorm1d
    model.first(torch.randn(4, 3))
    assert calls == ["hook"] * (2 if mirrored else 1)


def test_conversion_of_a_mirrored_module_synchronizes_it(make_strategy):
    plain = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    model = make_strategy(3).mirror(copy.deepcopy(plain))
    x = torch.randn(7, 3)
    assert not torch.allclose(model(x), plain(x), atol=1e-3)
    model.load_state_dict(plain.state_dict())
    convert_sync_batchnorm(model)
    assert_same(model(x), plain(x))
    assert_same(model.state_dict(), plain.state_dict())


def test_conversion_of_a_layer_alone_and_twice():
    layer = nn.BatchNorm2d(3, device="meta")
    converted = convert_sync_batchnorm(convert_sync_batchnorm(layer))
    assert converted is layer
    assert isinstance(converted, SyncBatchNorm)
    assert isinstance(converted, nn.modules.batchnorm._BatchNorm)
    assert converted.weight.device.type == "meta"
    assert repr(converted).startswith("SyncBatchNorm(3, eps=1e-05")


def test_a_converted_model_is_copied_and_saved(make_strategy, tmp_path):
    model = make_strategy(2).mirror(convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(3))))
    model(torch.randn(4, 3))
    assert_same(copy.deepcopy(model).state_dict(), model.state_dict())
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    assert type(loaded[0]) is SyncBatchNorm
    assert not mirror.is_mirrored(loaded)
    plain = nn.Sequential(nn.BatchNorm1d(3))
    plain.load_state_dict(model.state_dict())
    assert_same(plain.state_dict(), loaded.state_dict())


class Activated(nn.BatchNorm1d):
    def forward(self, x):
        return super().forward(x).relu()


class Renamed(nn.BatchNorm1d):
    """A subclass that changes no behaviour."""


def test_conversion_refuses_what_it_would_change():
    model = nn.Sequential(nn.BatchNorm1d(3), Activated(3))
    with pytest.raises(TypeError, match="1 is a Activated with a forward of its own"):
        convert_sync_batchnorm(model)
    assert type(model[0]) is nn.BatchNorm1d
    with pytest.raises(TypeError, match="LazyBatchNorm1d without parameters"):
        convert_sync_batchnorm(nn.LazyBatchNorm1d())
    assert type(convert_sync_batchnorm(Renamed(3))) is SyncBatchNorm
