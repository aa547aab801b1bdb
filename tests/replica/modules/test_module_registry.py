"""The structure of a mirrored module may change: new parts are mirrored, removed ones freed."""

import pytest
import torch
from torch import nn

import mirror
from tests.oracle import assert_same
from tests.replica.params.coherence import (
    N,
    Net,
    assert_all_see,
)
from tests.toy_models import ONES, ones_layer, replica_id, sgd


@pytest.fixture
def strategy(make_strategy):
    return make_strategy(N)


@pytest.fixture
def model(strategy):
    return strategy.mirror(Net())


def test_a_module_added_later_is_mirrored(strategy):
    model = strategy.mirror(nn.Sequential(nn.Linear(2, 2)))
    model(torch.ones(6, 2))
    model.append(nn.Linear(2, 3))
    assert model(torch.ones(6, 2)).shape == (6, 3)
    assert mirror.is_mirrored(model[1].weight)
    pointers = strategy.run(lambda: model[1].weight.data_ptr())
    assert len(set(pointers.values)) == N


def test_a_parameter_removed_later_is_gone_everywhere(strategy):
    model = strategy.mirror(nn.Linear(2, 2))
    model.bias = None
    assert strategy.run(lambda: model.bias) is None
    assert_same(model(torch.eye(2)), model.weight.detach().t())


def test_a_change_of_the_module_needs_no_copying(strategy):
    """eval(), hooks and attributes act on the one object that all replicas share."""
    model = strategy.mirror(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)))
    model.eval()
    assert strategy.run(lambda: model[1].training).values == (False,) * N
    calls = []
    handle = model[0].register_forward_hook(lambda *_: calls.append(replica_id()))
    model(torch.ones(6, 2))
    handle.remove()
    model(torch.ones(6, 2))
    assert sorted(calls) == [0, 1, 2]
    model[1].p = 0.0
    assert_same(model.train()(torch.ones(6, 2)), model.eval()(torch.ones(6, 2)))


@pytest.mark.parametrize("persistent", [True, False])
def test_a_buffer_registered_later_is_mirrored(persistent, strategy, model):
    model(torch.randn(6, 2))
    model.register_buffer("later", torch.full((2,), 4.0), persistent=persistent)
    assert_all_see(strategy, lambda: model.later, torch.full((2,), 4.0))
    assert mirror.is_mirrored(model.later)
    strategy.run(lambda: model.later.add_(replica_id()))
    assert_same(model.later, torch.full((2,), 5.0))
    assert ("later" in model.state_dict()) == persistent


def test_module_first_called_in_inference_mode_can_train(make_strategy):
    # A sanity validation mirrored the module into inference tensors: the first step raised.
    def train(layer):
        with torch.inference_mode():
            layer(ONES)
        layer(ONES).mean().backward()
        sgd(layer).step()

    plain = ones_layer()
    train(plain)
    strategy = make_strategy(2)
    with strategy.scope():
        layer = ones_layer()
        train(layer)
    assert_same(layer.state_dict(), plain.state_dict())
    strategy.check_replicas()
