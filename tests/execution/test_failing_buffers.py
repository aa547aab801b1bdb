"""A step that fails leaves every buffer with one value: that of the replicas that had begun."""

import contextlib

import pytest
import torch
from torch import nn

import mirror
from tests.oracle import assert_same

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
    """Those buffers whose values do not depend on the examples."""
    return {k: v for k, v in buffers.items() if "running" not in k}


def on_each(strategy, model):
    def read():
        found = (model.norm, model.late)
        named = {f"{i}.{k}": v.clone() for i, m in enumerate(found) for k, v in m.named_buffers()}
        return named | {"calls": model.calls.clone(), "level": model.level.clone()}

    return strategy.local_results(strategy.run(read))


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("way", [1, 2, 3])
@pytest.mark.parametrize("fails_in", FAILS_IN)
def test_a_failing_step_counts_as_on_one_device(make_strategy, fails_in, way, n):
    _, wanted = train(None, way, (fails_in,))
    strategy = make_strategy(n)
    _, found = train(strategy, way, (fails_in,))
    assert_same([*map(counts_of, found)], [*map(counts_of, wanted)])
    strategy.check_replicas()


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize(
    ("way", "fails_in"), [(1, "forward"), (2, "forward"), *((3, f) for f in FAILS_IN)]
)
@pytest.mark.parametrize("schedule", ["lockstep", "staggered"])
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
