"""Attributes of tensors are arguments of split calls; nested tensors; parts that are too small."""

import copy

import pytest
import torch
from torch import nn

import mirror
from tests.oracle import assert_same


class Marked(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        x.rows = self.layer(x)
        return x.rows * x.scale * x.weights[:, None]


@pytest.mark.parametrize("n", [1, 2, 3])
def test_attributes_of_tensors_are_arguments(n, make_strategy):
    plain = Marked()
    found = []
    for net in (plain, make_strategy(n).mirror(copy.deepcopy(plain))):
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
        x.scale, x.weights, x.names, x.itself = 3.0, torch.arange(5.0), ["a", "b"], x
        found.append((net(x), net(x), x.rows, x.scale, x.weights, x.names, sorted(vars(x))))
        assert x.itself is x
    assert_same(found[1], found[0], tolerance=1e-6)


class Takes(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, beside):
        return self.layer(x)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", ["strided", "jagged"])
def test_a_nested_tensor_is_refused(layout, make_strategy):
    net = make_strategy(2).mirror(nn.Linear(4, 3))
    nested = torch.nested.nested_tensor(
        [torch.ones(2, 4), torch.ones(3, 4)], layout=getattr(torch, layout)
    )
    with pytest.raises(mirror.BatchError, match="a nested tensor cannot be split"):
        net(nested)
    if layout == "jagged":  # beside examples it goes to every replica, whole
        assert Takes(net)(torch.ones(4, 4), nested).shape == (4, 3)


def test_a_part_too_small_for_batch_norm_has_the_remedy(make_strategy):
    net = make_strategy(2).mirror(nn.BatchNorm1d(3))
    with pytest.raises(ValueError, match="more than 1 value per channel") as caught:
        net(torch.ones(2, 3))
    assert any("convert_sync_batchnorm" in note for note in caught.value.__notes__)
