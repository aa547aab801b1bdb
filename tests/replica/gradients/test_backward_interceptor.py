"""Backward passes of other kinds, and passes over shared values, which stay one pass."""

import copy
import functools
import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import mirror
from tests.oracle import assert_same, finishes
from tests.replica.gradients.at_once import (
    batch_of,
    grads_of,
    loss_of,
    mirrored,
    small,
    ways,
    with_same_gradients,
)

pytestmark = pytest.mark.usefixtures("eager", "one_thread")


# Passes of another kind


@ways
def test_other_passes_run_as_they_are(way, make_eager, make_strategy):
    def through(strategy):
        model = mirrored(strategy)
        weight = model.body[0].weight

        def loss():
            return loss_of(strategy, model, (torch.ones(6, 6), torch.arange(6) % 3), way)

        yield torch.autograd.grad(loss(), weight)[0]
        loss().backward(inputs=[weight])
        yield weight.grad
        assert model.head.weight.grad is None
        weight.grad = None
        (grad,) = torch.autograd.grad(loss(), weight, create_graph=True)
        grad.square().sum().backward()
        yield weight.grad
        model.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a reference cycle, once in a process
            loss().backward(create_graph=True)
        assert weight.grad.grad_fn is not None
        yield weight.grad
        model.zero_grad()
        with torch.autograd.set_detect_anomaly(True, check_nan=False):
            loss().backward()
        yield weight.grad
        assert set(model.threads) == {threading.get_ident()}
        model.zero_grad()

    for single, apart in zip(through(make_strategy(2)), through(make_eager(2)), strict=True):
        assert_same(apart, single)


def test_a_pass_inside_a_pass_runs_as_it_is(make_eager):
    strategy, plain = make_eager(2), small()
    model = strategy.mirror(copy.deepcopy(plain))
    x, y = batch_of()
    for m in (model, plain):
        inner = F.cross_entropy(m(x), y)
        outer = torch.ones((), requires_grad=True)
        outer.register_hook(lambda grad, inner=inner: inner.backward())
        outer.backward()
    assert set(model.threads) == {threading.get_ident()}
    assert_same(grads_of(model), grads_of(plain))


def test_passes_of_another_thread_and_of_a_merge_run_as_they_are(make_eager):
    strategy, plain = make_eager(2), small()
    model = strategy.mirror(copy.deepcopy(plain))
    x, y = batch_of()
    F.cross_entropy(plain(x), y).backward()
    loss = loss_of(strategy, model, (x, y), 1)
    _, error, _ = finishes(loss.backward)
    assert error is None
    assert_same(grads_of(model), grads_of(plain))
    assert len(set(model.threads)) == 1

    model.zero_grad()
    model.threads.clear()

    def merged(strategy, losses):
        strategy.reduce("mean", losses).backward()

    def step(part):
        loss = F.cross_entropy(model(part[0]), part[1])
        mirror.get_replica_context().merge_call(merged, args=(loss,))

    (parts,) = strategy.distribute_dataset([(x, y)])
    strategy.run(step, args=(parts,))
    assert len(set(model.threads)) == 1
    assert_same(grads_of(model), grads_of(plain))


def test_a_pass_after_close_runs_as_it_is(make_eager):
    strategy = make_eager(2)
    model = mirrored(strategy)
    loss = loss_of(strategy, model, batch_of(), 1)
    strategy.close()
    loss.backward()
    assert set(model.threads) == {threading.get_ident()}


# What replicas have in common


def test_a_tensor_that_all_replicas_share_gets_the_whole_gradient(make_eager):
    strategy = make_eager(2)
    shared = torch.full((6,), 2.0, requires_grad=True)
    x = torch.arange(24.0).view(4, 6)
    losses = strategy.run(
        lambda part: (part * shared).sum(), args=(mirror.PerReplica(x.chunk(2)),)
    )
    strategy.reduce("sum", losses).backward()
    assert torch.equal(shared.grad, x.sum(0))


def test_an_input_that_requires_a_gradient_gets_it(make_eager):
    strategy, plain = make_eager(2), small()
    model = strategy.mirror(copy.deepcopy(plain))
    inputs = []
    for m in (model, plain):
        inputs.append(torch.linspace(-1, 1, 60).view(10, 6).requires_grad_())
        m(inputs[-1]).square().mean().backward()
    assert_same(inputs[0].grad, inputs[1].grad)
    assert_same(grads_of(model), grads_of(plain))


def test_a_chain_of_split_calls_goes_through_both(make_eager):
    strategy = make_eager(2)
    plain, plain_head = small(), nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    model, head = strategy.mirror(copy.deepcopy(plain)), strategy.mirror(copy.deepcopy(plain_head))
    x, y = batch_of()
    for first, second in ((model, head), (plain, plain_head)):
        F.cross_entropy(second(first(x)), y).backward()
    assert_same(grads_of(model), grads_of(plain))
    assert_same(grads_of(head), grads_of(plain_head))


def test_a_chain_of_runs_is_split_as_a_whole(make_eager):
    strategy, plain = make_eager(2), small()
    model = strategy.mirror(copy.deepcopy(plain))
    x, _ = batch_of()
    (parts,) = strategy.distribute_dataset([x])
    hidden = strategy.run(lambda part: model(part), args=(parts,))
    losses = strategy.run(lambda part: part.square().mean(), args=(hidden,))
    strategy.reduce("mean", losses).backward()
    plain(x).square().mean().backward()
    assert model.ran_at_once()
    assert_same(grads_of(model), grads_of(plain))


def test_a_penalty_of_the_parameters_is_added_to_the_replicas_losses(make_eager):
    strategy, plain = make_eager(2), small()
    model = strategy.mirror(copy.deepcopy(plain))
    x, y = batch_of()
    for m in (model, plain):
        (F.cross_entropy(m(x), y) + sum(p.square().sum() for p in m.parameters())).backward()
    assert_same(grads_of(model), grads_of(plain))


def test_unmirrored_parameters_in_the_loss_get_their_gradients_and_hooks(make_eager):
    strategy, plain = make_eager(2), small()
    model = strategy.mirror(copy.deepcopy(plain))
    x, y = batch_of()
    seen = []
    for m in (model, plain):
        scale = torch.full((3,), 1.5, requires_grad=True)
        scale.register_hook(seen.append)
        scale.register_post_accumulate_grad_hook(lambda scale: seen.append(scale.grad))
        F.cross_entropy(m(x) * scale, y).backward()
    assert model.ran_at_once()
    assert_same(seen[:2], seen[2:])
    assert_same(grads_of(model), grads_of(plain))


@pytest.mark.parametrize("how", ["all_reduce", "SyncBatchNorm"])
def test_collectives_of_the_forward_keep_the_pass_in_one(how, make_eager):
    strategy, plain = make_eager(2), small(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh())
    model = copy.deepcopy(plain)
    x, y = batch_of(11)
    if how == "SyncBatchNorm":
        model = strategy.mirror(mirror.nn.convert_sync_batchnorm(model))
        for m in (model, plain):
            F.cross_entropy(m(x), y).backward()
        assert_same(grads_of(model), grads_of(plain))
        assert set(model.threads) == {threading.get_ident()}
        return
    factor = torch.full((3,), 2.0, requires_grad=True)

    def loss(part):
        total = mirror.get_replica_context().all_reduce("sum", (part * scale).sum(0))
        return (total * part.mean(0)).sum()

    layer = strategy.mirror(nn.Linear(3, 1))
    with torch.no_grad():
        layer.weight.copy_(factor)
    scale = layer.weight
    z = torch.arange(12.0).view(4, 3)
    losses = strategy.run(loss, args=(mirror.PerReplica(z.chunk(2)),))
    strategy.reduce("sum", losses).backward()
    means = sum(part.mean(0) for part in z.chunk(2))
    ((z * factor).sum(0) * means).sum().backward()
    assert_same(layer.weight.grad[0], factor.grad)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_parts_keep_the_pass_in_one(reentrant, make_eager):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = small()
            self.last = nn.Linear(3, 3)

        def forward(self, x):
            # Without random states, for which the replicas would take turns.
            how = {"use_reentrant": reentrant, "preserve_rng_state": False}
            return checkpoint(self.inner, self.last(x[:, :3]).repeat(1, 2), **how)

    x, y = batch_of()
    model = with_same_gradients(make_eager(2), Checkpointed(), lambda m: F.cross_entropy(m(x), y))
    assert set(model.inner.threads) == {threading.get_ident()}


def test_hidden_saved_tensors_keep_the_pass_in_one(make_eager):
    class Writing(nn.Module):
        """Writes into a slice: what that has saved cannot be seen."""

        def __init__(self):
            super().__init__()
            self.inner = small()

        def forward(self, x):
            x = self.inner(x)
            x[:, 0] = x[:, 1] * 2
            return x

    x, y = batch_of()
    model = with_same_gradients(make_eager(2), Writing(), lambda m: F.cross_entropy(m(x), y))
    assert set(model.inner.threads) == {threading.get_ident()}


@pytest.mark.parametrize("name", ["backward", "grad"])
def test_functions_of_autograd_may_be_wrapped_by_a_tool(name, monkeypatch):
    found, original = [], getattr(torch.autograd, name)
    for is_wrapped in (False, True):
        if is_wrapped:
            wrapped = functools.wraps(original)(lambda *args, **kwargs: original(*args, **kwargs))
            monkeypatch.setattr(torch.autograd, name, wrapped)
        torch.manual_seed(0)
        with mirror.MirroredStrategy(["cpu"] * 2).scope():
            model = torch.nn.Linear(3, 2)
        loss = model(torch.randn(4, 3)).square().mean()
        if name == "grad":
            found.append(torch.autograd.grad(loss, model.weight)[0])
        else:
            loss.backward(inputs=[model.weight])
            found.append(model.weight.grad)
    assert torch.equal(*found)
