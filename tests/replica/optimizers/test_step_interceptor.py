"""One interception of ``optimizer.step``: any kind of optimizer, and the user's hooks within."""

import copy
import math
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import mirror
from mirror.execution.lifecycle import step_ends
from mirror.execution.run import current
from mirror.replica.optimizers.param_groups import step_hooks
from tests.oracle import assert_same
from tests.pairs import each_once, pairwise
from tests.replica.optimizers.kinds import SAM, Child, CounterOnSelf, Lookahead, lbfgs
from tests.replica.optimizers.stepping import (
    adam,
    batches,
    loss_of,
    momentum,
    pair,
    step_in_run,
)
from tests.toy_models import ONES, mirrored_layer, ones_layer, sgd

HISTORY = """
import torch
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
import mirror
from mirror.base.timeline import CROSS

{used_before}

def opened(optimizer, args, kwargs):
    timeline = strategies[-1]._group.replicas.timeline
    timeline.add_up()
    print("hook", [timeline._open[CROSS].name], len(timeline.steps))

strategies = []
for event in {history}:
    if event == "user":
        register_optimizer_step_pre_hook(opened)
        register_optimizer_step_post_hook(opened)
    else:
        strategies.append(mirror.MirroredStrategy(["cpu"] * event))
assert len(_global_optimizer_pre_hooks) == len(_global_optimizer_post_hooks) == 1
strategy = strategies[-1]
with strategy.scope():
    layer = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
layer(torch.ones(4, 1)).sum().backward()
optimizer.step()
print("steps", len(strategy._group.replicas.timeline.steps))
"""
USED_BEFORE = """
used = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)  # torch puts its hooks around
used.step()
"""


@pytest.mark.parametrize(
    ("history", "used_before"),
    [(("user", 2), USED_BEFORE), (("user", 1, 2), ""), ((1, "user", 2), ""), ((1, "user"), "")],
)
def test_hooks_of_the_user_run_within_the_time_of_the_step(history, used_before, script_pool):
    done = script_pool.run(HISTORY.format(history=history, used_before=used_before))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [*["hook ['SGD.step'] 0"] * 2, "steps 1"]


# Any kind of optimizer: each step is one step, with anything that it calls.


class WithoutSuper(torch.optim.SGD):
    """A subclass with a step of its own."""

    @torch.no_grad()
    def step(self, closure=None):
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] * p.grad)
        return loss


class Grandchild(Child):
    """Calls the step of its base, which calls that of torch."""

    def step(self, closure=None):
        return super().step(closure)


class Foreign:
    """Has the methods of an optimizer, and no class of torch as a base."""

    def __init__(self, params):
        self.optimizer = torch.optim.SGD(params, lr=0.1)
        self.param_groups = self.optimizer.param_groups

    def zero_grad(self):
        self.optimizer.zero_grad()

    def step(self, closure=None):
        return self.optimizer.step(closure)


def decorated(params):
    """An optimizer with its step replaced on the object, as schedulers do."""
    optimizer = momentum(params)
    inner = optimizer.step
    optimizer.step = lambda closure=None: inner(closure)
    return optimizer


def hooked_itself(params):
    optimizer = momentum(params)
    optimizer.register_step_pre_hook(lambda *args: None)
    optimizer.register_step_post_hook(lambda *args: None)
    return optimizer


KINDS = [
    *(momentum, adam, Child, Grandchild, WithoutSuper, CounterOnSelf, SAM, Lookahead, lbfgs),
    *(decorated, hooked_itself, Foreign),
]
NEED_CLOSURE = (SAM, lbfgs)
IN_RUN = [kind for kind in KINDS if kind not in (Foreign, *NEED_CLOSURE)]  # refused there


@pytest.fixture
def ends(monkeypatch):
    """The number of ends of steps so far."""
    ends = []
    monkeypatch.setattr(step_ends, "listeners", [lambda: ends.append(1)])
    return ends


@each_once(n=[1, 2, 3], kind=KINDS, within=["outside", "closure"])
def test_a_step_of_any_kind_is_one_step_outside_run(n, kind, within, make_strategy, ends):
    strategy = make_strategy(n)
    pairs = pair(strategy, kind)
    for batch in batches(3):
        for model, optimizer in pairs:

            def closure(model=model, optimizer=optimizer, batch=batch):
                optimizer.zero_grad()
                loss = loss_of(model, batch)
                loss.backward()
                return loss

            before = len(ends)
            if within == "closure" or kind in NEED_CLOSURE:
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()
            assert len(ends) == before + 1
            assert current.stepping == ()
    (plain, _), (model, optimizer) = pairs
    assert_same(list(model.parameters()), list(plain.parameters()))
    strategy.check_replicas()


@each_once(n=[1, 2, 3], kind=IN_RUN, schedule=["lockstep", "staggered"])
def test_a_step_of_any_kind_is_one_step_in_run(n, kind, schedule, make_strategy, ends):
    strategy = make_strategy(n, schedule=schedule)
    (plain, plain_optimizer), (model, optimizer) = pair(strategy, kind)
    for batch in batches(3):
        before = len(ends)
        step_in_run(strategy, model, optimizer, batch)
        assert len(ends) == before + 1
        plain_optimizer.zero_grad()
        loss_of(plain, batch).backward()
        plain_optimizer.step()
    assert_same(list(model.parameters()), list(plain.parameters()))
    strategy.check_replicas()


@pytest.mark.parametrize("in_run", [False, True])
@pytest.mark.parametrize("when", ["pre", "post"])
@pytest.mark.parametrize("kind", [momentum, Child, CounterOnSelf])
def test_a_hook_that_raises_leaves_the_optimizer_with_its_own_groups(
    kind, when, in_run, make_strategy
):
    strategy = make_strategy(2)
    _, (model, optimizer) = pair(strategy, kind)
    own = [p for group in optimizer.param_groups for p in group["params"]]

    def fail(optimizer, args, kwargs):
        raise ZeroDivisionError

    def step():
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()

    (batch,) = batches(1)
    handle = getattr(optimizer, f"register_step_{when}_hook")(fail)
    with pytest.raises(ZeroDivisionError):
        strategy.run(step) if in_run else step()
    handle.remove()
    assert current.stepping == ()
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert all(a is b for a, b in zip(held, own, strict=True))
    strategy.run(lambda: None)
    strategy.check_replicas()


@pytest.mark.parametrize("kind", [momentum, adam, Child, CounterOnSelf])
def test_hooks_of_the_state_see_that_of_one_device(kind, make_strategy):
    seen = {"plain": [], "mirrored": []}
    pairs = dict(zip(seen, pair(make_strategy(2), kind), strict=True))
    (batch,) = batches(1)
    for name, (model, optimizer) in pairs.items():
        record = seen[name].append
        optimizer.register_state_dict_pre_hook(lambda o, record=record: record("before"))
        optimizer.register_state_dict_post_hook(
            lambda o, state, record=record: record(copy.deepcopy(state))
        )
        optimizer.register_load_state_dict_pre_hook(lambda o, state, record=record: record("load"))
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
    assert_same(seen["mirrored"], seen["plain"])


@pytest.mark.parametrize("in_run", [False, True])
def test_a_scaler_that_skips_a_step_ends_none(in_run, make_strategy, ends):
    strategy = make_strategy(2)
    model = strategy.mirror(nn.Linear(2, 1))
    optimizer, scaler = momentum(model.parameters()), mirror.amp.GradScaler("cpu")

    def step(factor):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(2, 2)).sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()

    for factor, num_ends in ((1.0, 1), (math.inf, 1), (1.0, 2)):
        strategy.run(step, (factor,)) if in_run else step(factor)
        assert len(ends) == num_ends
    strategy.check_replicas()


@pytest.mark.replicated_state
def test_a_collective_in_a_hook_of_a_replicas_step_is_refused(make_strategy):
    strategy = make_strategy(2)
    _, (model, optimizer) = pair(strategy, momentum)

    def meet(optimizer, args, kwargs):
        mirror.get_replica_context().all_reduce("sum", torch.ones(()))

    optimizer.register_step_pre_hook(meet)
    (batch,) = batches(1)
    with pytest.raises(mirror.StrategyError, match=r"called inside optimizer\.step"):
        step_in_run(strategy, model, optimizer, batch)


def test_an_optimizer_without_a_strategy_is_left_alone(ends):
    weight = nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    optimizer = momentum([weight])
    optimizer.step()
    assert ends == [1]
    assert weight.item() == pytest.approx(0.9)


def test_hooks_of_optimizers_are_seen():
    optimizer = torch.optim.SGD([torch.ones(1)])
    assert not any(step_hooks(optimizer))
    handle = optimizer.register_step_pre_hook(lambda *args: None)
    assert any(step_hooks(optimizer))
    handle.remove()
    optimizer.register_step_post_hook(lambda *args: None)
    assert any(step_hooks(optimizer))


# What a hook does, and records.


def record_grads(optimizer, records):
    for group in optimizer.param_groups:
        for p in group["params"]:
            records.append([p.detach().clone(), p.grad.clone(), len(optimizer.state[p])])


def slow_down(optimizer, records):
    for group in optimizer.param_groups:
        group["lr"] *= 0.5
        records.append(group["lr"])


def clip(optimizer, records):
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    records.append(torch.nn.utils.clip_grad_norm_(parameters, 0.1))


def shrink(optimizer, records):
    with torch.no_grad():
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.mul_(0.9)


@contextmanager
def hooked(kind, act, records):
    """Has a global hook act; notes what it sees in the cross-replica context, or replica 0."""

    def hook(optimizer, args, kwargs):
        replica = mirror.get_replica_context()
        is_first = replica is None or replica.replica_id_in_sync_group == 0
        act(optimizer, records if is_first else [])

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
    records = []
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
    with hooked(kind, act, records):
        train(batches[late:3])
    train(batches[3:])
    return records, [p.detach().clone() for p in model.parameters()]


@pairwise(
    way=["lockstep", "staggered", "outside"],
    kind=["before", "after"],
    act=[record_grads, slow_down, clip, shrink],
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
