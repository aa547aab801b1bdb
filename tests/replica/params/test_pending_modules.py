"""Parameters on the meta device are mirrored as soon as they have values."""

import copy

import pytest
import torch
from torch import nn

import mirror
from tests.oracle import assert_same, train_loop
from tests.pairs import each_once


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 3)

    def forward(self, x):
        return self.last(self.norm(torch.tanh(self.first(x))))


def use_another(strategy):
    """A call of another model, at which all that the scope has recorded is mirrored."""
    with strategy.scope():
        nn.Linear(2, 2)(torch.zeros(4, 2))


def to_empty(model, state):
    model.to_empty(device="cpu")
    model.load_state_dict(state)


def to_empty_swapped(model, state):
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.to_empty(device="cpu")
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    model.load_state_dict(state)


def assign(model, state):
    model.load_state_dict(state, assign=True)


def set_attributes(model, state):
    for name, value in state.items():
        path, _, last = name.rpartition(".")
        module = model.get_submodule(path)
        setattr(module, last, nn.Parameter(value) if last in module._parameters else value)


def set_entries(model, state):
    """As accelerate's set_module_tensor_to_device does."""
    for name, value in state.items():
        path, _, last = name.rpartition(".")
        module = model.get_submodule(path)
        if last in module._parameters:
            module._parameters[last] = nn.Parameter(value)
        else:
            module._buffers[last] = value


def swap_tensors(model, state):
    """The parameter object stays: nothing is set on the module."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        value = state[name].clone()
        kind = nn.Parameter if isinstance(tensor, nn.Parameter) else torch.Tensor
        torch.utils.swap_tensors(tensor, kind(value) if kind is nn.Parameter else value)


FILLS = [to_empty, to_empty_swapped, assign, set_attributes, set_entries, swap_tensors]


@pytest.mark.parametrize("fill", FILLS, ids=lambda fill: fill.__name__)
@each_once(num_replicas=[1, 2], when=["in scope", "after", "used", "mirrored"])
def test_meta_parameters_are_mirrored_when_they_have_values(
    fill, when, num_replicas, make_strategy
):
    strategy = make_strategy(num_replicas)
    plain = Net().eval()
    state = copy.deepcopy(plain.state_dict())
    if when == "mirrored":
        with torch.device("meta"):
            model = strategy.mirror(Net())
    else:
        with strategy.scope():
            with torch.device("meta"):
                model = Net()
            if when == "in scope":
                fill(model, state)
        if when == "used":
            use_another(strategy)
    if when != "in scope":
        fill(model, state)
    model.eval()
    batches = [torch.randn(n, 4) for n in (5, 4)]
    for network in (model, plain):
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        train_loop(network, optimizer, batches, lambda module, x: module(x).square().mean())
    assert_same(model.state_dict(), plain.state_dict())
    assert all(map(mirror.is_mirrored, (*model.parameters(), *model.buffers())))
    strategy.check_replicas()


def test_shapes_are_computed_on_the_meta_device(make_strategy):
    with make_strategy(2).scope(), torch.device("meta"):
        model = Net()
        assert model(torch.zeros(5, 4)).shape == (5, 3)
    assert model.first.weight.is_meta


def test_a_skipped_initialisation_is_mirrored(make_strategy):
    strategy = make_strategy(2)
    with strategy.scope():
        layer = torch.nn.utils.skip_init(nn.Linear, 3, 3)
        assert layer(torch.zeros(4, 3)).shape == (4, 3)
    assert mirror.is_mirrored(layer.weight)
    strategy.check_replicas()


def test_a_module_in_the_place_of_one_that_is_gone_is_recorded():
    strategy = mirror.MirroredStrategy(["cpu"] * 2)
    with strategy.scope():
        seen, model = set(), None
        for _ in range(1000):
            model = None
            model = nn.Linear(2, 2)
            if id(model) in seen:
                break
            seen.add(id(model))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step():
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    strategy.run(step)
    assert strategy.check_replicas() == 2
