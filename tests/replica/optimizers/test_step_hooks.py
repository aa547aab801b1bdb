"""Hooks of optimizer steps; steps that are refused or fail leave no trace."""

import copy
import weakref
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import mirror
from tests.oracle import assert_same, in_run
from tests.pairs import pairwise
from tests.toy_models import ONES, collect, mirrored_layer, ones_layer, sgd

HISTORY = """
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
import mirror

def users(optimizer, args, kwargs):
    pass

strategies = []
for event in {history}:
    if event == "user":
        register_optimizer_step_pre_hook(users)
        register_optimizer_step_post_hook(users)
    else:
        strategies.append(mirror.MirroredStrategy(["cpu"] * event))
for hooks in (_global_optimizer_pre_hooks, _global_optimizer_post_hooks):
    print(*[hook.__name__ for hook in hooks.values()])
"""


@pytest.fixture
def hooks_after(script_pool):
    def after(*history):
        done = script_pool.run(HISTORY.format(history=history))
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    return after


@pytest.mark.parametrize("history", [(2,), (1, 2), (2, 1), (1, 1, 3, 2)])
def test_what_lends_is_within_the_time_of_a_step_whoever_came_first(history, hooks_after):
    before, after = hooks_after(*history)
    assert before == "_step_begins _before_step"
    assert after == "_after_step _step_ends"


def test_a_strategy_of_one_replica_installs_the_time_alone(hooks_after):
    assert hooks_after(1, 1) == ["_step_begins", "_step_ends"]


@pytest.mark.parametrize("history", [("user", 2), ("user", 1, 2), (1, "user", 2)])
def test_hooks_of_the_users_are_within_mirrors_whoever_came_first(history, hooks_after):
    before, after = hooks_after(*history)
    assert before == "_step_begins _before_step users"
    assert after == "users _after_step _step_ends"


# What a hook does, and notes.


def record_step(optimizer, noted):
    for group in optimizer.param_groups:
        for p in group["params"]:
            noted.append([p.detach().clone(), p.grad.clone(), len(optimizer.state[p])])


def slow_down(optimizer, noted):
    for group in optimizer.param_groups:
        group["lr"] *= 0.5
        noted.append(group["lr"])


def clip(optimizer, noted):
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    noted.append(torch.nn.utils.clip_grad_norm_(parameters, 0.1))


def shrink(optimizer, noted):
    with torch.no_grad():
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.mul_(0.9)


@contextmanager
def hooked(kind, act, noted):
    """Has a global hook act; notes what it sees in the cross-replica context, or replica 0."""

    def hook(optimizer, args, kwargs):
        replica = mirror.get_replica_context()
        is_first = replica is None or replica.replica_id_in_sync_group == 0
        act(optimizer, noted if is_first else [])

    register = {
        "before": register_optimizer_step_pre_hook,
        "after": register_optimizer_step_post_hook,
    }[kind]
    handle = register(hook)
    try:
        yield
    finally:
        handle.remove()


def trained(model, optimizer, strategy, kind, act, late):
    noted = []
    torch.manual_seed(1)
    batches = torch.randn(4, 6, 3).double()

    def step(x):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    def train(xs):
        for x in xs:
            if strategy is None:
                step(x)
            else:
                (part,) = strategy.distribute_dataset([x])
                strategy.run(step, (part,))

    train(batches[:late])
    with hooked(kind, act, noted):
        train(batches[late:3])
    train(batches[3:])
    return noted, [p.detach().clone() for p in model.parameters()]


@pairwise(
    way=["lockstep", "staggered", "outside"],
    kind=["before", "after"],
    act=[record_step, slow_down, clip, shrink],
    late=[0, 1],
    make=[torch.optim.SGD, torch.optim.AdamW],
)
def test_global_hooks_see_and_do_what_they_do_on_one_device(
    make_strategy, way, kind, act, late, make
):
    plain = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double()
    strategy = make_strategy(3, schedule="lockstep" if way == "outside" else way)
    model = strategy.mirror(copy.deepcopy(plain))
    in_run = None if way == "outside" else strategy
    options = {"lr": 0.5, **({"momentum": 0.9} if make is torch.optim.SGD else {})}
    actual, expected = (
        trained(m, make(m.parameters(), **options), where, kind, act, late)
        for m, where in ((model, in_run), (plain, None))
    )
    torch.testing.assert_close(actual, expected)
    strategy.check_replicas()


@pytest.mark.parametrize("way", ["groups", "model"])
def test_step_post_hook_writes_to_all_replicas(make_strategy, way):
    # A hook that clamps weights after the step saw the first replica's only.
    def train(layer):
        nn.init.constant_(layer.weight, -1.0)
        optimizer = sgd(layer)

        @torch.no_grad()
        def clamp(optimizer, args, kwargs):
            groups = optimizer.param_groups[0]["params"]
            for p in groups if way == "groups" else layer.parameters():
                p.clamp_(min=0.0)

        optimizer.register_step_post_hook(clamp)
        layer(ONES).sum().backward()
        optimizer.step()
        return layer(ONES)

    strategy = make_strategy(2)
    assert_same(train(mirrored_layer(strategy)), train(ones_layer()))
    strategy.check_replicas()


def test_step_pre_hook_changes_gradients_of_all_replicas(make_strategy):
    # A hook that clips came after the other replicas had stepped with unclipped gradients.
    def train(layer):
        optimizer = sgd(layer)

        def clip(optimizer, args, kwargs):
            nn.utils.clip_grad_norm_(layer.parameters(), 1e-3)

        optimizer.register_step_pre_hook(clip)
        layer(ONES).sum().backward()
        optimizer.step()
        return layer(ONES)

    strategy = make_strategy(2)
    assert_same(train(mirrored_layer(strategy)), train(ones_layer()))
    strategy.check_replicas()


# Optimizers


class NoisySGD(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            p.add_(-0.1 * p.grad + torch.randn_like(p))


class NoisyLangevin(torch.optim.SGD):
    """Steps as torch does, then draws: inside run that would be by turns."""

    def __init__(self, params):
        super().__init__(params, lr=0.1)

    @torch.no_grad()
    def step(self):
        super().step()
        for p in self.param_groups[0]["params"]:
            p.add_(torch.randn_like(p))


NOISY = [NoisySGD, NoisyLangevin]


@pytest.mark.parametrize("kind", NOISY)
def test_optimizer_that_draws_noise_draws_it_once(make_strategy, kind):
    # Every replica drew its own noise, and their weights went apart at the first step.
    def train(layer):
        optimizer = kind(layer.parameters())
        torch.manual_seed(1)
        for _ in range(3):
            optimizer.zero_grad()
            layer(ONES).mean().backward()
            optimizer.step()
        return layer.state_dict()

    strategy = make_strategy(3)
    assert_same(train(mirrored_layer(strategy)), train(ones_layer()))
    strategy.check_replicas()


@pytest.mark.parametrize("kind", NOISY)
@pytest.mark.parametrize("schedule", ["lockstep", "staggered"])
def test_optimizer_that_draws_noise_is_refused_in_run(make_strategy, schedule, kind):
    # In run, too, every replica drew its own noise; there each steps alone, so it cannot work.
    strategy = make_strategy(2, schedule=schedule)
    layer = mirrored_layer(strategy)
    optimizer = kind(layer.parameters())

    def step(batch):
        layer(batch).mean().backward()
        optimizer.step()

    with pytest.raises(mirror.StrategyError, match="random numbers"):
        in_run(strategy, step, ONES)


def test_closure_that_raises_leaves_the_optimizer_as_it_was(make_strategy):
    # The next step without a closure ended as one with a closure: the groups kept one replica's
    # ordinary parameters forever, and no later step did anything.
    def fail():
        raise ValueError("no loss")

    def train(layer):
        optimizer = torch.optim.Adam(layer.parameters(), lr=0.1)
        with pytest.raises(ValueError, match="no loss"):
            optimizer.step(fail)
        for _ in range(2):
            optimizer.zero_grad()
            layer(ONES).sum().backward()
            optimizer.step()
        assert optimizer.param_groups[0]["params"][0] is layer.weight
        return layer.state_dict()

    strategy = make_strategy(2)
    assert_same(train(mirrored_layer(strategy)), train(ones_layer()))
    strategy.check_replicas()


def test_collective_inside_a_step_is_refused(make_strategy):
    # The merge took the optimizer back in mid-step: Adam restarted in each step, silently.
    strategy = make_strategy(2)
    layer = mirrored_layer(strategy)
    optimizer = torch.optim.Adam(layer.parameters())

    def count(optimizer, args, kwargs):
        mirror.get_replica_context().all_reduce("sum", torch.ones(()))

    optimizer.register_step_pre_hook(count)

    def step(batch):
        layer(batch).mean().backward()
        optimizer.step()

    with pytest.raises(mirror.StrategyError, match=r"inside optimizer\.step"):
        in_run(strategy, step, ONES)


# Lifetime


@pytest.mark.parametrize("failure", ["hook", "closure"])
def test_step_that_raised_keeps_nothing_alive(failure):
    # The frame of the failed step stayed referenced: model, optimizer and copies forever.
    def fail(*args):
        raise ValueError("out of memory")

    def make():
        strategy = mirror.MirroredStrategy(["cpu"] * 3)
        layer = mirrored_layer(strategy)
        optimizer = torch.optim.Adam(layer.parameters())
        layer(ONES).sum().backward()
        try:
            if failure == "hook":
                optimizer.register_step_pre_hook(fail)
                optimizer.step()
            else:
                optimizer.step(fail)
        except ValueError:
            pass
        return [weakref.ref(thing) for thing in (strategy, layer, optimizer)]

    alive = make()
    collect()
    assert [ref() for ref in alive] == [None, None, None]
