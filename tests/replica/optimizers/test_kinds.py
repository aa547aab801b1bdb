"""Optimizers that each break one assumption step as on one device, in all three ways."""

import contextlib
import copy
import itertools
import pathlib
import sys

import pytest
import torch
from torch import nn

import mirror
from tests.oracle import assert_same
from tests.pairs import each_once, pairwise
from tests.replica.optimizers.kinds import (
    KINDS,
    LOG,
    SAM,
    Child,
    CounterOnSelf,
    Lookahead,
    Plain,
    adam,
    child,
    lbfgs,
)

SIZES = [7, 5, 2, 8]


def net():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def loss_of(model, x):
    return (model(x) - 1).square().mean()


def batches():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size, 3, generator=generator) for size in SIZES]


def train(way, strategy, model, optimizer, with_closure=False):
    """Returns the losses; way 0 is one device."""
    losses = []

    def step(x, forward):
        def closure():
            optimizer.zero_grad()
            loss = forward(x)
            loss.backward()
            return loss

        if with_closure:
            return optimizer.step(closure).detach()
        loss = closure()
        optimizer.step()
        return loss.detach()

    def forward(x):
        return loss_of(model, x)

    def reduced(part):
        return strategy.reduce("mean", strategy.run(forward, args=(part,)))

    if way < 2:
        for x in batches():
            losses.append(step(x, forward))
            if way:
                strategy.check_replicas()
        return losses
    for part in strategy.distribute_dataset(batches()):
        if way == 2:
            losses.append(step(part, reduced))
        else:
            loss = strategy.run(step, args=(part, forward))
            losses.append(strategy.reduce("mean", loss))
        strategy.check_replicas()
    return losses


def python_state(optimizer):
    """What an optimizer holds in Python, for comparison; of optimizers that it holds, too."""
    held = {}
    for name, value in vars(optimizer).items():
        if name in ("state", "_mirror", "step", "params", "sums") or name.endswith("_hooks"):
            continue
        if name.startswith(("_warned", "_need", "_zero", "param_groups")):
            continue
        if isinstance(value, torch.optim.Optimizer):
            value = python_state(value)
        elif name == "children":
            value = [python_state(inner) for inner in value]
        elif isinstance(value, nn.Module):
            value = value.state_dict()
        elif isinstance(value, itertools.count):
            value = repr(value)
        held[name] = value
    held["options"] = [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    return held


def compared(way, strategy, make_optimizer, with_closure=False, tolerance=None):
    results = []
    plain = net()
    model = strategy.mirror(copy.deepcopy(plain))
    for run_way, module in ((0, plain), (way, model)):
        LOG.clear()
        optimizer = make_optimizer(module.parameters())
        losses = train(run_way, strategy, module, optimizer, with_closure)
        state = [copy.deepcopy(value) for value in optimizer.state.values()]
        results.append([losses, module.state_dict(), python_state(optimizer), state, list(LOG)])
    assert_same(results[1], results[0], tolerance=tolerance)


@each_once(schedule=["lockstep", "staggered"], kind=KINDS, way=[1, 2, 3])
def test_what_a_step_changes_it_changes_once(make_strategy, schedule, kind, way):
    compared(way, make_strategy(3, schedule=schedule), kind)


@each_once(make_optimizer=[SAM, lbfgs, child, adam, CounterOnSelf, Lookahead], way=[1, 2, 3])
def test_a_closure_is_that_of_one_device(make_strategy, make_optimizer, way):
    tolerance = 1e-4 if make_optimizer is lbfgs else None
    compared(way, make_strategy(3), make_optimizer, True, tolerance)


@pytest.mark.parametrize("kind", [Child, CounterOnSelf])
def test_a_step_that_raises_may_be_repeated(make_strategy, kind):
    strategy = make_strategy(2)
    model = strategy.mirror(net())
    optimizer = kind(model.parameters())

    def step(x):
        optimizer.zero_grad()
        loss_of(model, x).backward()
        optimizer.step()

    (part,) = strategy.distribute_dataset([torch.ones(4, 3)])
    strategy.run(step, args=(part,))
    group = optimizer.param_groups[0]
    params, group["params"] = group["params"], [*group["params"], None]
    with pytest.raises((AttributeError, TypeError)) as caught:
        strategy.run(step, args=(part,))
    assert caught.value.__notes__ == ["in replica 0 of 2 (cpu)"]  # it has changed nothing
    group["params"] = params
    strategy.run(step, args=(part,))
    strategy.check_replicas()


class FailsAtTheEnd(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        raise ValueError("planted")


@pytest.mark.parametrize("in_run", [False, True])
def test_an_error_in_a_step_says_that_the_update_may_be_incomplete(make_strategy, in_run):
    strategy = make_strategy(2)
    model = strategy.mirror(net())
    optimizer = FailsAtTheEnd(model.parameters(), lr=0.1)
    loss_of(model, torch.ones(4, 3)).backward()
    with pytest.raises(ValueError, match="planted") as caught:
        strategy.run(optimizer.step) if in_run else optimizer.step()
    assert any("may be partly updated" in note for note in caught.value.__notes__)
    strategy.check_replicas()


def test_arguments_that_differ_are_refused(make_strategy):
    class Scaled(Plain):
        def step(self, factor):
            self.param_groups[0]["lr"] *= factor

    strategy = make_strategy(2)
    model = strategy.mirror(net())
    optimizer = Scaled(model.parameters())
    strategy.run(lambda: optimizer.step(0.5))
    assert optimizer.param_groups[0]["lr"] == 0.05
    with pytest.raises(mirror.StrategyError, match=r"different values: 1, 2"):
        strategy.run(
            lambda: optimizer.step(1 + mirror.get_replica_context().replica_id_in_sync_group)
        )


def test_an_optimizer_that_is_not_mirrored_is_each_replicas_own(make_strategy):
    strategy = make_strategy(2)

    def own():
        parameter = torch.ones(2, requires_grad=True)  # of a Parameter the user is told
        optimizer = CounterOnSelf([parameter])
        parameter.sum().backward()
        optimizer.step()
        return parameter.detach(), optimizer.count

    parameters, counts = strategy.run(own)
    assert counts.values == (1, 1)
    for parameter in parameters.values:
        assert_same(parameter, torch.full((2,), 0.9))


@pytest.mark.parametrize("way", [1, 2, 3])
def test_a_wrapper_that_is_no_optimizer_works_outside_run(make_strategy, way):
    class Averaging:
        def __init__(self, params):
            self.base = torch.optim.SGD(params, lr=0.1)
            self.count = 0

        @property
        def param_groups(self):
            return self.base.param_groups

        @property
        def state(self):
            return self.base.state

        def zero_grad(self):
            self.base.zero_grad()

        @torch.no_grad()
        def step(self):
            self.count += 1
            self.base.step()
            for p in self.param_groups[0]["params"]:
                p.mul_(1 - 0.1 / self.count)

    if way < 3:
        compared(way, make_strategy(3), Averaging)
        return
    with pytest.raises(mirror.StrategyError, match=r"Averaging\.step wraps a SGD"):
        compared(way, make_strategy(3), Averaging)


class OptimizerView(torch.optim.Optimizer):
    """An optimizer without torch's constructor that shows another's state."""

    def __init__(self, base):
        self.base, self.state, self.param_groups = base, base.state, base.param_groups


class PlainView:
    """No optimizer; it shows another's state, as wrappers of trainers do."""

    def __init__(self, base):
        self.base, self.state = base, base.state


class CopiedView:
    """Takes over the attributes of another, in one dict."""

    def __init__(self, base):
        self.__dict__ = dict(vars(base))


VIEWS = [OptimizerView, PlainView, CopiedView]


@pairwise(
    n=[1, 2, 3],
    views=[[], *[[view] for view in VIEWS], VIEWS],
    references=[2, 0],
    inside=[False, True],
)
def test_wrappers_show_the_state_of_the_optimizer_for_any_count_of_references(
    n, views, references, inside, monkeypatch
):
    monkeypatch.setattr(sys, "getrefcount", lambda found: references)
    strategy = mirror.MirroredStrategy(["cpu"] * n)
    with strategy.scope() if inside else contextlib.nullcontext():
        with strategy.scope():
            model = nn.Linear(2, 1)
            base = torch.optim.Adam(model.parameters(), lr=0.1)
        wrappers = [view(base) for view in views]

        def step(x):
            base.zero_grad()
            model(x).mean().backward()
            base.step()

        for count in (1, 2):
            strategy.run(step, (torch.ones(6, 2),))
            for shown in wrappers:
                assert shown.state is base.state
                assert shown.state[model.weight]["step"] == count
        base.load_state_dict(base.state_dict())
        wrappers = [view(base) for view in views]
        strategy.run(step, (torch.ones(6, 2),))
        for shown in wrappers:
            assert shown.state[model.weight]["step"] == 3
    strategy.close()


def test_no_code_depends_on_counts_of_references():
    package = pathlib.Path(mirror.__file__).parent
    named = [path.name for path in package.rglob("*.py") if "getrefcount" in path.read_text()]
    assert named == ["tensor_holders.py"]  # where a reference too many costs memory alone
