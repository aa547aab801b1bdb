"""Steps that fail: the strategy stays usable, and every buffer has one value."""

import contextlib
import contextvars
import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mirror
from tests.execution.failing import (
    Boom,
    N,
    error_of,
    loss_of,
    replica,
    text_of,
    trained_pair,
    works,
)
from tests.oracle import assert_same, finishes
from tests.pairs import each_once


@each_once(
    after_backward=[True, False],
    who=[pytest.param(value, id=str(value)) for value in [[0], [2], [N - 1], range(N)]],
)
def test_an_error_between_backward_and_step_leaves_no_stale_gradient(
    who, after_backward, strategy
):
    plain, model, x = trained_pair(strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def fails():
        _, r = replica()
        loss = loss_of(model, x)
        if r in who and not after_backward:
            raise Boom
        loss.backward()
        if r in who:
            raise Boom
        optimizer.step()

    assert type(error_of(strategy, fails)) is Boom
    assert_same(model.state_dict(), plain.state_dict(), "no replica has stepped")

    def goes_on():
        loss_of(model, x).backward()  # no zero_grad before it
        return [p.grad.clone() for p in model.parameters()]

    grads, error, _ = finishes(lambda: strategy.run(goes_on))
    assert error is None
    loss_of(plain, x).backward()
    for result in strategy.local_results(grads):
        assert_same(result, [p.grad for p in plain.parameters()], "gradients")
    strategy.check_replicas()


def test_an_error_under_no_sync_leaves_no_stale_gradient(strategy):
    plain, model, x = trained_pair(strategy)

    def fails():
        loss_of(model, x).backward()
        if replica()[1] == 1:
            raise Boom

    with strategy.no_sync():
        assert type(error_of(strategy, fails)) is Boom
    model.zero_grad()
    loss_of(model, x).backward()
    loss_of(plain, x).backward()
    assert_same(model[0].weight.grad, plain[0].weight.grad)


def test_replicas_that_step_different_optimizers_diverge(strategy):
    _, model, x = trained_pair(strategy)
    first = torch.optim.SGD(model[0].parameters(), lr=0.1)
    second = torch.optim.SGD(model[2].parameters(), lr=0.1)

    def fn():
        loss_of(model, x).backward()
        (first if replica()[1] == 0 else second).step()

    assert type(error_of(strategy, fn)) is mirror.DivergenceError


class FailingSGD(torch.optim.SGD):
    """Fails when ``fails`` says so, before it changes anything."""

    fails = staticmethod(lambda: False)

    @torch.no_grad()
    def step(self, closure=None):
        if self.fails():
            raise Boom("step")
        return super().step(closure)


@pytest.mark.replicated_state
@pytest.mark.parametrize("who", [[0], [2], range(N)], ids=str)
def test_an_error_in_optimizer_step_gives_the_optimizer_back(who, strategy):
    plain, model, x = trained_pair(strategy)
    optimizers = [FailingSGD(m.parameters(), lr=0.1, momentum=0.9) for m in (plain, model)]
    parameters = list(model.parameters())

    def step():
        optimizers[1].zero_grad()
        loss_of(model, x).backward()
        optimizers[1].step()

    def plain_step():
        optimizers[0].zero_grad()
        loss_of(plain, x).backward()
        optimizers[0].step()

    strategy.run(step)
    plain_step()
    saved = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizers[1].state_dict())
    optimizers[1].fails = lambda: replica()[1] in who
    error = error_of(strategy, step)
    assert type(error) is Boom
    assert "of 4 (cpu)" in text_of(error)
    optimizers[1].fails = lambda: False
    held = optimizers[1].param_groups[0]["params"]
    assert all(p is q for p, q in zip(held, parameters, strict=True))
    assert set(map(id, optimizers[1].state)) <= set(map(id, parameters))
    model.load_state_dict(saved[0])
    optimizers[1].load_state_dict(saved[1])
    strategy.check_replicas()
    for _ in range(2):
        strategy.run(step)
        plain_step()
    strategy.check_replicas()
    assert_same(model.state_dict(), plain.state_dict())
    assert_same(optimizers[1].state_dict(), plain_optimizer_state(optimizers[0]))


def plain_optimizer_state(optimizer):
    return optimizer.state_dict()


def test_an_error_in_optimizer_step_outside_run_gives_the_optimizer_back(strategy):
    plain, model, x = trained_pair(strategy)
    optimizers = [FailingSGD(m.parameters(), lr=0.1, momentum=0.9) for m in (plain, model)]
    loss_of(model, x).backward()
    optimizers[1].fails = lambda: True
    with pytest.raises(Boom):
        optimizers[1].step()
    optimizers[1].fails = lambda: False
    held = optimizers[1].param_groups[0]["params"]
    assert all(p is q for p, q in zip(held, model.parameters(), strict=True))
    strategy.check_replicas()
    optimizers[1].step()
    loss_of(plain, x).backward()
    optimizers[0].step()
    assert_same(model.state_dict(), plain.state_dict())
    strategy.check_replicas()
    works(strategy)


def test_an_error_within_backward_arrives_as_itself(strategy):
    plain, model, x = trained_pair(strategy)

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y, r):
            ctx.r = r
            return y.clone()

        @staticmethod
        def backward(ctx, grad):
            if ctx.r == 1:
                raise Boom("backward")
            return grad, None

    def fn():
        _, r = replica()
        Fails.apply(model(x), r).square().mean().backward()
        return model[0].weight.grad

    error = error_of(strategy, fn)
    assert type(error) is Boom
    assert "in replica 1 of 4 (cpu)" in text_of(error)
    model.zero_grad()
    loss_of(model, x).backward()
    loss_of(plain, x).backward()
    assert_same(model[0].weight.grad, plain[0].weight.grad)


def test_an_error_in_a_backward_outside_run_leaves_the_model_usable(strategy):
    plain, model, x = trained_pair(strategy)
    failing = [True]

    def hook(grad):
        if failing[0]:
            raise Boom("hook")

    y = model(x)
    y.register_hook(hook)
    with pytest.raises(Boom):
        y.square().mean().backward()
    failing[0] = False
    model.zero_grad()
    loss_of(model, x).backward()
    loss_of(plain, x).backward()
    assert_same(model[0].weight.grad, plain[0].weight.grad)
    works(strategy)


def test_an_error_in_a_transparent_call_names_the_replica(strategy):
    class Picky(nn.Linear):
        def forward(self, x):
            if (x == 7).any():
                raise Boom("seven")
            return super().forward(x)

    plain = Picky(2, 2)
    model = strategy.mirror(copy.deepcopy(plain))
    x = torch.arange(16.0).view(8, 2)  # 7 is in the second of four parts
    _, error, _ = finishes(lambda: model(x))
    assert type(error) is Boom
    assert "in replica 1 of 4 (cpu)" in text_of(error)
    assert_same(model(x[4:]), plain(x[4:]))
    works(strategy)


def test_a_module_that_diverges_in_a_transparent_call_is_an_error(strategy):
    class Diverges(nn.Linear):
        def forward(self, x):
            context, r = replica()
            y = super().forward(x)
            return y + (context.all_reduce("sum", y.mean()) if r == 1 else 0.0)

    model = strategy.mirror(Diverges(2, 2))
    _, error, _ = finishes(lambda: model(torch.randn(8, 2)))
    assert type(error) is mirror.DivergenceError
    works(strategy)


def test_an_error_does_not_leak_the_state_of_its_replica(strategy):
    """Grad mode, default dtype and context variables of the caller are as before."""
    variable = contextvars.ContextVar("variable", default="outside")

    def fn():
        variable.set("inside")
        torch.set_grad_enabled(False)
        raise Boom

    with pytest.raises(Boom):
        strategy.run(fn)
    assert torch.is_grad_enabled()
    assert strategy.run(torch.is_grad_enabled).values == (True,) * N
    assert mirror.get_replica_context() is not None  # the default one: no strategy is current
    assert not mirror.has_strategy()
    assert F.relu(torch.ones(1, requires_grad=True)).requires_grad


def test_structures_that_differ_between_replicas_are_an_error(strategy):
    def fn():
        _, r = replica()
        return {"a": torch.ones(1)} if r == 1 else {"b": torch.ones(1)}

    assert type(error_of(strategy, fn)) is mirror.StructureError


FAILS_IN = ("forward", "loss", "backward")
X = torch.arange(24.0).reshape(6, 4) % 5


class Counting(nn.Module):
    """BatchNorm, and buffers that count calls and keep a moving mean."""

    def __init__(self, fails_in=()):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.late = nn.BatchNorm1d(4, momentum=None)
        self.fails_in = fails_in
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("level", torch.zeros(4))

    def forward(self, x, fails):
        x = self.norm(x)
        if fails and "forward" in self.fails_in:
            raise ZeroDivisionError
        self.calls += 1
        self.level = self.level * 0.5 + 0.5
        return Fails.apply(self.late(x), fails and "backward" in self.fails_in)


class Fails(torch.autograd.Function):
    """Raises in its backward if asked to."""

    @staticmethod
    def forward(ctx, x, fails):
        ctx.fails = fails
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.fails:
            raise ZeroDivisionError
        return grad, None


def train(strategy, way, fails_in, fails=(False, True, False)):
    """Three steps, of which some fail; returns the model, and what it holds after each step."""
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = Counting(fails_in)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
    seen = []

    def loss_of(x, fails):
        return model(x, fails).square().mean()

    def step(x, fails):
        optimizer.zero_grad()
        loss = loss_of(x, fails)
        if fails and "loss" in fails_in:
            raise ZeroDivisionError
        loss.backward()
        optimizer.step()

    for i, fail in enumerate(fails):
        with pytest.raises(ZeroDivisionError) if fail else contextlib.nullcontext():
            if not strategy or way == 1:
                step(X + i, fail)
            else:
                (x,) = strategy.distribute_dataset([X + i])
                if way == 3:
                    strategy.run(step, (x, fail))
                else:
                    losses = strategy.run(loss_of, (x, fail))
                    optimizer.zero_grad()
                    if fail and "loss" in fails_in:
                        raise ZeroDivisionError
                    strategy.reduce("mean", losses).backward()
                    optimizer.step()
        seen.append({k: v.detach().clone() for k, v in model.named_buffers()})
    return model, seen


def counts_of(buffers):
    """The buffers with values that do not depend on the examples."""
    return {k: v for k, v in buffers.items() if "running" not in k}


def on_each(strategy, model):
    def read():
        found = (model.norm, model.late)
        named = {f"{i}.{k}": v.clone() for i, m in enumerate(found) for k, v in m.named_buffers()}
        return named | {"calls": model.calls.clone(), "level": model.level.clone()}

    return strategy.local_results(strategy.run(read))


@each_once(fails_in=FAILS_IN, way=[1, 2, 3], n=[1, 2, 3])
def test_a_failing_step_counts_as_on_one_device(make_strategy, fails_in, way, n):
    _, wanted = train(None, way, (fails_in,))
    strategy = make_strategy(n)
    _, found = train(strategy, way, (fails_in,))
    assert_same([*map(counts_of, found)], [*map(counts_of, wanted)])
    strategy.check_replicas()


@each_once(
    **{"way,fails_in": [(1, "forward"), (2, "forward"), *((3, f) for f in FAILS_IN)]},
    schedule=["lockstep", "staggered"],
    n=[2, 3],
)
def test_after_a_run_that_fails_all_replicas_have_equal_buffers(
    make_strategy, schedule, fails_in, way, n
):
    strategy = make_strategy(n, schedule=schedule)
    model, seen = train(strategy, way, (fails_in,), fails=(False, True))
    first, *others = on_each(strategy, model)
    for other in others:
        assert all(torch.equal(other[name], first[name]) for name in first)
    assert_same(first["calls"], seen[-1]["calls"])


@pytest.mark.parametrize("how", ["sum", "none"])
def test_a_run_that_fails_leaves_replicas_their_own_sums(make_strategy, how):
    strategy = make_strategy(2)
    with strategy.scope():
        model = Counting()
    mirror.set_aggregation(model, "level", how)
    strategy.run(
        lambda: model.level.fill_(1.0 + mirror.get_replica_context().replica_id_in_sync_group)
    )

    def fail():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        strategy.run(fail)
    values = strategy.local_results(strategy.run(lambda: model.level[0].item()))
    assert values == (1.0, 2.0)
