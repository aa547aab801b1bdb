"""Whose a module is: the replicas that its calls are split over, also when it is compiled."""

import copy

import pytest
import torch
from torch import nn

import mirror
from mirror.replica.modules.call_interceptor import owner_of

X = torch.ones(4, 3)


@pytest.fixture(name="strategy")
def _strategy():
    with mirror.MirroredStrategy(["cpu"] * 2) as strategy:
        yield strategy


def sizes_seen(module, call):
    """Returns how many examples the module is called with, each time."""
    sizes = []
    handle = module.register_forward_pre_hook(lambda _, args: sizes.append(len(args[0])))
    call()
    handle.remove()
    return sizes


def test_the_modules_of_one_strategy_have_one_owner(strategy):
    model = strategy.mirror(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)))
    owner = owner_of(model)
    assert owner is not None
    assert owner.num_replicas == 2
    assert owner.strategy is strategy
    assert all(owner_of(part) is owner for part in model.modules())
    with mirror.MirroredStrategy(["cpu"] * 3) as other:
        assert owner_of(other.mirror(nn.Linear(3, 2))).strategy is other


def test_what_is_not_mirrored_has_none(strategy):
    assert owner_of(None) is None
    assert owner_of(nn.Linear(3, 2)) is None
    assert owner_of(copy.deepcopy(strategy.mirror(nn.Linear(3, 2)))) is None


def test_what_has_a_mirrored_modules_dict_has_none(strategy):
    model = strategy.mirror(nn.Linear(3, 2))
    other = nn.Linear(3, 2)
    other.__dict__.update(vars(model))
    assert owner_of(other) is None
    assert owner_of(model) is not None


def test_a_compiled_module_keeps_its_owner_and_its_calls_are_split(strategy):
    model = strategy.mirror(nn.Linear(3, 2))
    owner = owner_of(model)
    model.compile(backend="eager")
    assert owner_of(model) is owner
    assert sizes_seen(model, lambda: model(X)) == [2, 2]


def test_a_module_compiled_with_a_copied_dict_is_called_itself(strategy):
    model = strategy.mirror(nn.Linear(3, 2))
    other = nn.Linear(3, 2)
    other.__dict__.update(vars(model))
    other.compile(backend="eager")
    assert owner_of(other) is None
    assert sizes_seen(other, lambda: other(X)) == [4]
    assert sizes_seen(model, lambda: model(X)) == [2, 2]
