"""Hooks of all optimizers' steps: mirror's own, in their order, and the user's."""

import copy
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import mirror
from tests.oracle import assert_same
from tests.pairs import pairwise
from tests.toy_models import ONES, mirrored_layer, ones_layer, sgd

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


def note(optimizer, noted):
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
    act=[note, slow_down, clip, shrink],
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
