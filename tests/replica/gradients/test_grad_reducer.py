"""Gradients outside run are read, changed and cleared on every replica; autograd.grad."""

import copy
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mirror
from tests.oracle import assert_same, in_run
from tests.replica.params.coherence import (
    N,
    Net,
    assert_all_see,
    values_seen,
)
from tests.toy_models import ONES, mirrored_layer, ones_layer, sgd


@pytest.fixture
def strategy(make_strategy):
    return make_strategy(N)


@pytest.fixture
def model(strategy):
    return strategy.mirror(Net())


# Gradients


def with_gradients(strategy):
    plain = nn.Linear(2, 2)
    model = strategy.mirror(copy.deepcopy(plain))
    x = torch.randn(10, 2)
    for m in (plain, model):
        m(x).square().mean().backward()
    return plain, model


def set_grad(p):
    p.grad = torch.full_like(p, 3.0)


def set_grad_data(p):
    p.grad.data = torch.full_like(p, 3.0)


def mul_under_no_grad(p):
    with torch.no_grad():
        p.grad *= 2.0


GRADIENT_CHANGES = {
    "assigned": set_grad,
    "none": lambda p: setattr(p, "grad", None),
    "multiplied": lambda p: p.grad.mul_(0.5),
    "multiplied-data": lambda p: p.grad.data.mul_(0.5),
    "data-assigned": set_grad_data,
    "no-grad": mul_under_no_grad,
    "copied": lambda p: p.grad.copy_(torch.ones_like(p)),
    "zeroed": lambda p: p.grad.zero_(),
    "indexed": lambda p: p.grad.__setitem__(0, 9.0),
    "clipped": lambda p: nn.utils.clip_grad_value_([p], 0.01),
    "noise": lambda p: p.grad.add_(torch.arange(p.numel()).view_as(p)),
}


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("change", GRADIENT_CHANGES.values(), ids=GRADIENT_CHANGES.keys())
def test_a_changed_gradient_reaches_every_replica(change, inside, strategy):
    plain, model = with_gradients(strategy)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model)]
    for m in (plain, model):
        change(m.weight)
    expected = plain.weight.grad
    for value in values_seen(strategy, lambda: model.weight.grad):
        assert_same(value, expected)
    optimizers[0].step()
    if inside:
        strategy.run(optimizers[1].step)
    else:
        optimizers[1].step()
    assert_same(model.state_dict(), plain.state_dict())
    strategy.check_replicas()


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("who", ["model", "optimizer"])
def test_zero_grad_outside_run_clears_every_replica(who, set_to_none, strategy):
    _, model = with_gradients(strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (model if who == "model" else optimizer).zero_grad(set_to_none=set_to_none)
    for value in values_seen(strategy, lambda: model.weight.grad):
        assert value is None if set_to_none else torch.equal(value, torch.zeros(2, 2))


def test_gradients_accumulate_over_contexts(strategy):
    plain, model = with_gradients(strategy)
    x = torch.randn(7, 2)
    (batch,) = strategy.distribute_dataset([x])
    strategy.run(lambda part: model(part).square().mean().backward(), args=(batch,))
    plain(x).square().mean().backward()
    assert_same(model.weight.grad, plain.weight.grad)
    for m in (plain, model):
        m.weight.grad.mul_(2.0)
        m(x).square().mean().backward()
    assert_same(model.weight.grad, plain.weight.grad)


def test_a_backward_outside_run_that_touches_a_parameter_directly_is_whole(strategy):
    """An L2 term alone: no replica has a gradient of its own."""
    plain, model = with_gradients(strategy)
    for m in (plain, model):
        m.zero_grad()
        m.weight.square().sum().backward()
    for value in values_seen(strategy, lambda: model.weight.grad):
        assert_same(value, plain.weight.grad)


def test_requires_grad_reaches_every_replica(strategy):
    model = strategy.mirror(nn.Linear(2, 2))
    weight = model.weight
    weight.requires_grad_(False)
    assert_all_see(strategy, lambda: model.weight.requires_grad, False)
    assert not model(torch.ones(6, 2)).sum().backward()
    assert model.weight.grad is None
    assert model.bias.grad is not None
    weight.requires_grad = True
    assert_all_see(strategy, lambda: model.weight.requires_grad, True)
    model(torch.ones(6, 2)).sum().backward()
    assert model.weight.grad is not None
    model.requires_grad_(False)
    assert_all_see(strategy, lambda: [p.requires_grad for p in model.parameters()], [False] * 2)


# autograd


def test_parameters_work_in_any_expression_outside_run(strategy, model):
    w = model.linear.weight
    plain = w.detach().clone().requires_grad_()
    for expression in (
        lambda w: (w @ w).sum(),
        lambda w: torch.cat([w, w]).square().sum(),
        lambda w: F.linear(torch.ones(1, 2), w).sum(),
        lambda w: torch.einsum("ij,kj->ik", w, w).sum(),
        lambda w: nn.utils.parameters_to_vector([w, w]).sum(),
        lambda w: (2.0 - w).norm(),
    ):
        model.zero_grad()
        plain.grad = None
        assert_same(expression(w).detach(), expression(plain).detach())
        expression(w).backward()
        expression(plain).backward()
        assert_same(w.grad, plain.grad)
    assert f"{w[0, 0].item():.3f}"[:3] in repr(w)
    assert len(w) == 2
    assert w.tolist() == plain.tolist()


# Gradients and weights


def test_graph_built_before_the_first_call_keeps_its_gradient(make_strategy):
    # A penalty made before the model is mirrored ends in the parameter itself, and its gradient
    # vanished in silence.
    def gradient():
        layer = ones_layer(2)
        penalty = layer.weight.pow(2).sum()
        (layer(torch.ones(2, 2)).mean() + penalty).backward()
        return layer.weight.grad

    expected = gradient()
    with make_strategy(2).scope():
        assert_same(gradient(), expected)


@pytest.mark.filterwarnings("ignore:the loss of this backward pass")  # a sum
@pytest.mark.parametrize("change", ["zero_grad", "clip"])
def test_gradient_changed_in_place_under_no_sync_is_refused(make_strategy, change):
    # With several parts gathered, .grad is a fresh sum: zeroing or clipping it changed nothing.
    strategy = make_strategy(2)
    layer = mirrored_layer(strategy)
    optimizer = sgd(layer)

    def backward(batch):
        layer(batch).sum().backward()

    def backward_and_change(batch):
        backward(batch)
        if change == "zero_grad":
            optimizer.zero_grad(set_to_none=False)
        else:
            nn.utils.clip_grad_value_(layer.parameters(), 0.5)

    with strategy.no_sync():
        in_run(strategy, backward, ONES)
        with pytest.raises(mirror.StrategyError, match="in place under no_sync"):
            in_run(strategy, backward_and_change, ONES)


# Runs, merges and contexts


def test_another_thread_cannot_read_gradients_during_run(make_strategy):
    # A logging thread that looked at .grad reduced half a step: 7.5 for a mean of 3.
    strategy = make_strategy(2)
    layer = mirrored_layer(strategy)
    errors = []

    def log():
        try:
            layer.weight.grad
        except mirror.StrategyError as error:
            errors.append(str(error))

    def step(batch):
        layer(batch).mean().backward()
        thread = threading.Thread(target=log)
        thread.start()
        thread.join()

    in_run(strategy, step, torch.tensor([[1.0], [2.0], [6.0]]))
    assert_same(layer.weight.grad, torch.tensor([[3.0]]))
    assert len(errors) == 2
    assert all("another thread" in error for error in errors)


# Optimizers and their state


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_one_gradient_passed_to_backward_on_all_replicas_is_not_shared(make_strategy, reduction):
    # Autograd makes a view of what `backward` was given the gradient of a parameter: replicas
    # given one tensor weighed and summed it in place, over each other, since a reduction of
    # gradients no longer looks at where they lie.
    strategy = make_strategy(2, gradient_reduction=reduction)
    layer = mirrored_layer(strategy, in_features=3)
    given = torch.ones(3)

    def step():
        context = mirror.get_replica_context()
        context.weight = 1 + context.replica_id_in_sync_group
        layer.weight.view(-1).backward(given)

    strategy.run(step)
    assert torch.equal(given, torch.ones(3))
    assert_same(layer.weight.grad, torch.full((1, 3), 2.0 if reduction == "sum" else 1.0))
