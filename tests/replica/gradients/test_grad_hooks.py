"""Hooks of parameters see, and replace, the gradient of one device."""

import copy
import gc
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import mirror
from tests.oracle import in_run
from tests.pairs import pairwise
from tests.replica.gradients.bucketed import (
    SIZE,
    assert_same_grads,
    chain,
    loss_of,
    pair,
)

HOOKS = {
    "doubles": lambda grad: grad * 2,
    "clamps": lambda grad: grad.clamp(-0.01, 0.01),
    "looks": lambda grad: None,
    "signs": lambda grad: grad.sign(),
}


def by_backward(model, parameters, x):
    model(x).square().mean().backward()
    return [p.grad for p in parameters]


def by_grad(model, parameters, x):
    return torch.autograd.grad(model(x).square().mean(), parameters)


def by_grad_of_one(model, parameters, x):
    return torch.autograd.grad(model(x).square().mean(), parameters[0])


def by_grad_with_graph(model, parameters, x):
    loss = model(x).square().mean()
    grads = torch.autograd.grad(loss, parameters, create_graph=True)
    sum(grad.square().sum() for grad in grads).backward()
    return [*grads, *(p.grad for p in parameters)]


def by_batched_grad(model, parameters, x):
    out = model(x).mean(0)
    return torch.autograd.grad(out, parameters, torch.eye(2).to(out), is_grads_batched=True)


def by_grad_of_part(model, parameters, x):
    loss = model[0](x).square().mean()
    options = {"allow_unused": True, "materialize_grads": True}
    return torch.autograd.grad(loss, parameters, **options)


WAYS = [by_backward, by_grad, by_grad_of_one, by_grad_with_graph, by_batched_grad, by_grad_of_part]


def net():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double()


@pairwise(n=[1, 3], hook=HOOKS, way=WAYS)
def test_hooks_see_the_gradient_of_one_device(make_strategy, way, hook, n):
    plain, x = net(), torch.randn(7, 3).double()
    model = make_strategy(n).mirror(copy.deepcopy(plain))
    seen, found = [], []
    for module in (plain, model):
        called = []
        for p in list(module.parameters())[1:]:
            p.register_hook(lambda grad, called=called: called.append(tuple(grad.shape)))
            p.register_hook(HOOKS[hook])
        found.append(way(module, list(module.parameters()), x))
        seen.append(sorted(called))
    assert seen[0] == seen[1]
    for actual, expected in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(actual, expected)


def test_a_removed_hook_is_not_called(make_strategy):
    model = make_strategy(2).mirror(nn.Linear(3, 1))
    handle = model.weight.register_hook(lambda grad: grad * 0)
    for removed in (False, True):
        if removed:
            handle.remove()
        (grad,) = torch.autograd.grad(model(torch.ones(4, 3)).mean(), [model.weight])
        assert bool(grad.any()) == removed


@pytest.mark.parametrize("by", ["attribute", "list"])
def test_a_hook_never_gets_a_replicas_own_gradient_from_grad(make_strategy, by):
    strategy = make_strategy(2)
    model = strategy.mirror(nn.Linear(3, 1))
    parameters = list(model.parameters())

    def grad():
        weight = model.weight if by == "attribute" else parameters[0]
        return torch.autograd.grad(model(torch.ones(2, 3)).mean(), [weight])[0]

    assert strategy.run(grad).values[1].any()
    model.bias.register_hook(lambda grad: grad * 2)
    assert strategy.run(grad).values[1].any()
    model.weight.register_hook(lambda grad: grad * 2)
    with pytest.raises(mirror.StrategyError, match="hook of parameter 'weight' has to see that"):
        strategy.run(grad)


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_registered_in_forward_is_reported(make_strategy, kind):
    class Hooking(nn.Linear):
        def forward(self, x):
            getattr(self.weight, kind)(lambda value: None)
            return super().forward(x)

    model = make_strategy(2).mirror(Hooking(3, 1))
    with pytest.raises(mirror.StrategyError, match=r"register_hook|post-accumulate"):
        model(torch.ones(4, 3))


def test_a_hook_of_a_parameter_that_was_frozen_when_it_was_mirrored(make_small_buckets):
    strategy = make_small_buckets()
    plain = chain()
    plain[1].weight.requires_grad_(False)
    model = copy.deepcopy(plain)
    for m in (plain, model):
        m[1].weight.requires_grad_(True)
        m[1].weight.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
        m[1].weight.requires_grad_(False)
    strategy.mirror(model)
    for requires_grad in (False, True, False, True):
        batch = torch.randn(8, SIZE)
        for m in (plain, model):
            m[1].weight.requires_grad_(requires_grad)
            loss_of(m, batch).backward()
        assert_same_grads(strategy, model, plain)


@pytest.mark.parametrize("no_sync", [True, False])
def test_a_hook_does_not_see_the_gradient_of_a_pass_before_it_was_registered(
    make_small_buckets, no_sync
):
    strategy = make_small_buckets()
    plain, model = pair(strategy, chain())
    for _ in range(2):
        batch = torch.randn(8, SIZE)
        with strategy.no_sync() if no_sync else nullcontext():
            for m in (plain, model):
                loss_of(m, batch).backward()
                m[1].weight.register_hook(lambda grad: 2 * grad)
    assert_same_grads(strategy, model, plain)


def test_a_known_step_has_no_hook_but_those_that_end_buckets(make_small_buckets, monkeypatch):
    strategy = make_small_buckets()
    _, model = pair(strategy, chain())
    for _ in range(4):
        in_run(strategy, lambda x: loss_of(model, x).backward(), torch.randn(8, SIZE))
    hooks = [
        len(getattr(copy, "_post_accumulate_grad_hooks", None) or ())
        for parameter in model.parameters()
        for copy in parameter._mirrored.copies
    ]
    ends = len(strategy._group.gradients._reduction._buckets._plan.ends)
    assert sum(hooks) == 2 * ends


@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_dropped_strategy_of_parameters_with_hooks_is_collected(n):
    """The garbage collector does not see what hooks of autograd refer to."""

    def use():
        strategy = mirror.MirroredStrategy(["cpu"] * n)
        model = strategy.mirror(chain())
        model[1].weight.register_hook(lambda grad: 2 * grad)
        in_run(strategy, lambda x: loss_of(model, x).backward(), torch.randn(8, SIZE))
        return weakref.ref(strategy)

    dropped = use()
    use()  # the last one may still be referred to
    gc.collect()
    assert dropped() is None
