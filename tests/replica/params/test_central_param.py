"""Parameters at home: whoever changes them, home and all copies have the same values."""

import pytest
import torch
from torch import nn

import mirror
from tests.oracle import in_run
from tests.toy_models import ONES, mirrored_layer

SIZES = [7, 3, 1]


def test_home_is_no_replicas_storage(central):
    strategy = central(3)
    layer = mirrored_layer(strategy)
    home = layer.weight.data_ptr()
    copies = {p.item() for p in strategy.local_results(strategy.run(pointer, args=(layer,)))}
    assert len(copies) == 3
    assert home not in copies


def pointer(layer):
    return torch.tensor(layer.weight.data_ptr())


CHANGES = {
    "in place": lambda p: p.mul_(2.0),
    "through .data": lambda p: p.data.mul_(2.0),
    "assigned": lambda p: setattr(p, "data", p.data * 2.0),
    "through numpy": lambda p: p.detach().numpy().__imul__(2.0),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
@pytest.mark.parametrize("size", [2, 1])
def test_what_replicas_change_in_a_run_home_takes(change, size, central):
    strategy = central(2)
    layer = mirrored_layer(strategy)

    @torch.no_grad()
    def fn(x):
        change(layer.weight)
        return mirror.get_replica_context().merge_call(lambda s, x: layer.weight.item(), args=(x,))

    assert {*strategy.local_results(in_run(strategy, fn, ONES[:size]))} == {2.0}
    assert layer.weight.item() == 2.0
    strategy.check_replicas()
    assert (layer(ONES) == 2.0).all()


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_what_changes_at_home_replicas_take(change, central):
    strategy = central(2)
    layer = mirrored_layer(strategy)
    with torch.no_grad():
        change(layer.weight)
    assert (layer(ONES) == 2.0).all()
    strategy.check_replicas()


def test_an_assigned_layout_is_homes_too(central):
    strategy = central(2)
    with strategy.scope():
        layer = nn.Conv2d(2, 3, 2)

    def fn():
        layer.weight.data = layer.weight.data.to(memory_format=torch.channels_last)

    strategy.run(fn)
    assert layer.weight.is_contiguous(memory_format=torch.channels_last)
    strategy.check_replicas()


def test_freezing_inside_a_run_holds_at_home(central):
    strategy = central(2)
    layer = mirrored_layer(strategy)
    strategy.run(lambda: layer.weight.requires_grad_(False) and None)
    assert not layer.weight.requires_grad
    layer.weight.requires_grad_(True)
    layer(ONES).sum().backward()
    assert layer.weight.grad.item() == 4.0


def test_a_run_that_fails_leaves_home_and_replicas_equal(central):
    strategy = central(2)
    layer = mirrored_layer(strategy)

    def fn():
        with torch.no_grad():
            layer.weight.add_(1.0)
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        strategy.run(fn)
    strategy.check_replicas()
    assert (layer(ONES) == layer.weight.item()).all()


def test_a_replica_that_differs_from_home_is_named(central):
    strategy = central(2)
    layer = mirrored_layer(strategy)
    layer(ONES)
    layer.weight._mirrored.targets[1].data.add_(1.0)
    with pytest.raises(mirror.ReplicaMismatchError, match="replica 1 of 2"):
        strategy.check_replicas()
