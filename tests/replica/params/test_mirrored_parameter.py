"""Changes of a parameter outside run reach every replica and the parameter device."""

import copy

import pytest
import torch
from torch import nn

import mirror
from tests.oracle import assert_same, in_run
from tests.pairs import each_once
from tests.replica.params.coherence import Net, assert_all_see, train_a_step
from tests.toy_models import ONES, mirrored_layer

NEW = torch.full((2, 2), 7.0)


def no_grad(change):
    def changed(model):
        with torch.no_grad():
            change(model)

    return changed


def assign_data(model):
    model.linear.weight.data = NEW.clone()


def keep_a_handle_to_data(model):
    handle = model.linear.weight.data
    handle.fill_(7.0)


def swap_with_set(model):
    model.linear.weight.set_(NEW.clone())


def load_state(model):
    state = {k: v.clone() for k, v in model.state_dict().items()}
    model.load_state_dict({**state, "linear.weight": NEW})


def load_state_assign(model):
    state = {k: v.clone() for k, v in model.state_dict().items()}
    model.load_state_dict({**state, "linear.weight": NEW.clone()}, assign=True)


def write_to_state_dict(model):
    model.state_dict()["linear.weight"].fill_(7.0)


def write_to_detached(model):
    model.linear.weight.detach().fill_(7.0)


def write_to_view(model):
    view = model.linear.weight.view(4)
    view[:2] = 7.0
    view[2:] = 7.0


def write_through_numpy(model):
    model.linear.weight.data.numpy()[:] = 7.0


def write_with_foreach(model):
    torch._foreach_mul_([model.linear.weight], 0.0)
    torch._foreach_add_([model.linear.weight], 7.0)


def new_parameter(model):
    model.linear.weight = nn.Parameter(NEW.clone())


def new_module(model):
    model.linear = nn.Linear(2, 2)
    with torch.no_grad():
        model.linear.weight.fill_(7.0)


def apply_function(model):
    model.apply(lambda m: m.weight.data.fill_(7.0) if isinstance(m, nn.Linear) else None)


def vector_to_parameters(model):
    nn.utils.vector_to_parameters(torch.full((4,), 7.0), [model.linear.weight])


CHANGES = {
    "data-assigned": assign_data,
    "data-copied": lambda m: m.linear.weight.data.copy_(NEW),
    "data-filled": lambda m: m.linear.weight.data.fill_(7.0),
    "data-indexed": lambda m: m.linear.weight.data.__setitem__(slice(None), 7.0),
    "data-handle": keep_a_handle_to_data,
    "copied": no_grad(lambda m: m.linear.weight.copy_(NEW)),
    "filled": no_grad(lambda m: m.linear.weight.fill_(7.0)),
    "indexed": no_grad(lambda m: m.linear.weight.__setitem__(slice(None), 7.0)),
    "in-place-arithmetic": no_grad(lambda m: m.linear.weight.mul_(0).add_(7)),
    "set": no_grad(swap_with_set),
    "init": lambda m: nn.init.constant_(m.linear.weight, 7.0),
    "load_state_dict": load_state,
    "load_state_dict-assign": load_state_assign,
    "state_dict-written": write_to_state_dict,
    "detached-written": write_to_detached,
    "view-written": no_grad(write_to_view),
    "numpy-written": write_through_numpy,
    "foreach": no_grad(write_with_foreach),
    "new-parameter": new_parameter,
    "new-module": new_module,
    "apply": apply_function,
    "vector_to_parameters": vector_to_parameters,
}


@each_once(
    used_before=[False, True],
    change=[pytest.param(value, id=key) for key, value in CHANGES.items()],
)
def test_a_changed_parameter_reaches_every_replica(used_before, change, strategy, model):
    if used_before:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        train_a_step(strategy, model, optimizer)
    change(model)
    assert_all_see(strategy, lambda: model.linear.weight, NEW)
    strategy.check_replicas()
    assert mirror.is_mirrored(model.linear.weight)


def test_a_handle_to_data_kept_for_long_writes_to_every_replica(strategy, model):
    handle = model.linear.weight.data
    for value in (1.0, 2.0, 3.0):
        handle.fill_(value)
        assert_all_see(strategy, lambda: model.linear.weight, torch.full((2, 2), value))
        train_a_step(strategy, model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_changed_parameter_is_used_by_the_next_transparent_call(change, strategy, model):
    plain = Net().eval()
    model.eval()
    model(torch.randn(9, 2))
    change(model)
    plain.load_state_dict(copy.deepcopy(model.state_dict()))
    x = torch.randn(9, 2)
    assert_same(model(x), plain(x))
    if change is not new_module:
        assert_same(plain.linear.weight.detach(), NEW, tolerance=0)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_training_goes_on_from_a_changed_parameter(change, strategy):
    """SGD without momentum, as a new parameter has no state; a fresh optimizer sees it."""
    plain = nn.Sequential()
    plain.linear = nn.Linear(2, 2)
    model = strategy.mirror(copy.deepcopy(plain))
    x = torch.randn(11, 2)
    for m in (plain, model):
        m.linear(x).square().mean().backward()
        change(m)
        if change is new_module:
            m.linear.bias = nn.Parameter(torch.zeros(2))
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            m.linear(x).square().mean().backward()
            optimizer.step()
    assert_same(model.state_dict(), plain.state_dict())
    strategy.check_replicas()


def test_the_getter_of_data_gives_that_of_the_replica(make_strategy):
    strategy = make_strategy(2)
    layer = strategy.mirror(torch.nn.Linear(2, 2))
    read = torch.Tensor.data.__get__

    def is_the_same():
        return torch.equal(read(layer.weight), layer.weight.data)

    assert is_the_same()
    assert strategy.run(is_the_same).values == (True, True)


GRADIENT = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
PASSES = {
    "positional": lambda weight: weight.backward(GRADIENT),
    "named": lambda weight: weight.backward(gradient=GRADIENT),
    "of autograd": lambda weight: torch.autograd.backward(weight, GRADIENT),
    "of autograd, named": lambda weight: torch.autograd.backward(weight, grad_tensors=GRADIENT),
}


@pytest.mark.parametrize("backward", PASSES.values(), ids=PASSES.keys())
def test_a_pass_begins_at_a_parameter_with_the_gradient_given(backward, model):
    backward(model.linear.weight)
    assert torch.equal(model.linear.weight.grad, GRADIENT)


SIZES = [7, 3, 1]


def test_the_parameter_device_has_storage_of_its_own(central):
    strategy = central(3)
    layer = mirrored_layer(strategy)
    home = layer.weight.data_ptr()
    copies = {p.item() for p in strategy.local_results(strategy.run(pointer, args=(layer,)))}
    assert len(copies) == 3
    assert home not in copies


def pointer(layer):
    return torch.tensor(layer.weight.data_ptr())


CENTRAL_CHANGES = {
    "in place": lambda p: p.mul_(2.0),
    "through .data": lambda p: p.data.mul_(2.0),
    "assigned": lambda p: setattr(p, "data", p.data * 2.0),
    "through numpy": lambda p: p.detach().numpy().__imul__(2.0),
}


@pytest.mark.parametrize("change", CENTRAL_CHANGES.values(), ids=CENTRAL_CHANGES.keys())
@pytest.mark.parametrize("size", [2, 1])
def test_a_change_in_run_reaches_the_parameter_device(change, size, central):
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


@pytest.mark.parametrize("change", CENTRAL_CHANGES.values(), ids=CENTRAL_CHANGES.keys())
def test_a_change_on_the_parameter_device_reaches_the_replicas(change, central):
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


def test_freezing_inside_a_run_freezes_the_parameter_device(central):
    strategy = central(2)
    layer = mirrored_layer(strategy)
    strategy.run(lambda: layer.weight.requires_grad_(False) and None)
    assert not layer.weight.requires_grad
    layer.weight.requires_grad_(True)
    layer(ONES).sum().backward()
    assert layer.weight.grad.item() == 4.0


def test_a_run_that_fails_leaves_parameter_device_and_replicas_equal(central):
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


def test_a_replica_that_differs_from_the_parameter_device_is_named(central):
    strategy = central(2)
    layer = mirrored_layer(strategy)
    layer(ONES)
    layer.weight._mirrored.targets[1].data.add_(1.0)
    with pytest.raises(mirror.ReplicaMismatchError, match="replica 1 of 2"):
        strategy.check_replicas()
