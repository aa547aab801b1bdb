"""Conversion to SyncBatchNorm keeps everything but the class."""

import copy

import pytest
import torch
from torch import nn

import mirror
from mirror.nn import SyncBatchNorm, convert_sync_batchnorm
from tests.oracle import assert_same


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
