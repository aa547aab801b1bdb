"""Options of an optimizer that replicas change inside ``run``: alike, or told."""

import copy

import pytest
import torch
from torch import nn

import mirror
from tests.pairs import pairwise


def here():
    return mirror.get_replica_context().replica_id_in_sync_group


def run(strategy, change, when):
    model = strategy.mirror(nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        model(torch.ones(2, 3)).mean().backward()
        if when == "before":
            change(optimizer.param_groups[0])
        optimizer.step()
        if when == "after":
            change(optimizer.param_groups[0])

    strategy.run(step)
    strategy.check_replicas()
    return optimizer.param_groups[0]["lr"]


def decay(group):
    group["lr"] *= 0.5


def one_alone(group):
    if here() == 1:
        group["lr"] = 9.0


def each_its_own(group):
    group["lr"] = 0.1 * (1 + here())


def all_alike(group):
    group["lr"] = 0.3


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("change", [decay, one_alone, each_its_own])
def test_replicas_that_change_a_rate_differently_are_told(make_strategy, change, when):
    with pytest.raises(mirror.StrategyError, match=r"'lr' of parameter group 0 of SGD"):
        run(make_strategy(3), change, when)


@pytest.mark.parametrize("schedule", ["lockstep", "staggered"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_replicas_that_change_a_rate_alike_may(make_strategy, schedule, when):
    assert run(make_strategy(3, schedule=schedule), all_alike, when) == 0.3


class ByTurns(torch.optim.SGD):
    def step(self):
        super().step()


class Once(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] * p.grad)


def rated(strategy, kind, when, who):
    """Returns what a program leaves in which one replica alone sets a rate."""
    model = nn.Linear(3, 2).double()
    nn.init.zeros_(model.weight)
    if strategy is not None:
        strategy.mirror(model)
    optimizer = kind(model.parameters(), lr=0.1)

    def change(where):
        replica = 0 if strategy is None else here()
        if where == when and replica == who:
            optimizer.param_groups[0]["lr"] = 9.0

    def step():
        change("at the start")
        model(torch.ones(2, 3).double()).sum().backward()
        change("before")
        optimizer.step()
        change("after")

    if strategy is None:
        step()
    else:
        strategy.run(step)
        strategy.check_replicas()
    return model.weight.detach().clone(), optimizer.param_groups[0]["lr"]


KINDS = [torch.optim.SGD, torch.optim.AdamW, ByTurns, Once]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("when", "who"),
    [("at the start", 1), ("at the start", 2), ("before", 1), ("before", 2), ("after", 1)],
)
def test_a_later_replica_that_changes_a_rate_alone_is_told(make_strategy, kind, when, who):
    with pytest.raises(mirror.StrategyError, match="'lr' of parameter group 0"):
        rated(make_strategy(3), kind, when, who)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("when", ["at the start", "before"])
def test_the_first_replica_that_changes_a_rate_alone_does_what_one_device_does(
    make_strategy, kind, when
):
    expected = rated(None, kind, when, 0)
    torch.testing.assert_close(rated(make_strategy(3), kind, when, 0), expected)


def test_a_rate_of_a_wrapper_that_is_no_optimizer_is_told(make_strategy):
    class Warmup:
        """Counts the steps of all replicas."""

        def __init__(self, optimizer):
            self.optimizer, self.steps = optimizer, 0

        def step(self):
            self.steps += 1
            for group in self.optimizer.param_groups:
                group["lr"] = 0.1 * self.steps
            self.optimizer.step()

    strategy = make_strategy(2)
    model = strategy.mirror(nn.Linear(3, 2))
    warmup = Warmup(torch.optim.Adam(model.parameters()))

    def step():
        model(torch.ones(2, 3)).mean().backward()
        warmup.step()

    with pytest.raises(mirror.StrategyError, match="decay it do so N times"):
        strategy.run(step)


def slow_down(optimizer, args, kwargs):
    for group in optimizer.param_groups:
        group["lr"] *= 0.5


def slow_down_in_place(optimizer, args, kwargs):
    for group in optimizer.param_groups:
        group["lr"].mul_(0.5)


def limit(optimizer, args, kwargs):
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.25 * group["lr"]


def trained(model, strategy, way, prepare, batches, rate):
    """Returns parameters, and the options of every step as they are seen after it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    prepare(optimizer)
    seen = []

    def step(x):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        group = optimizer.param_groups[0]
        return torch.tensor([float(group["lr"]), float(group["weight_decay"])])

    for x in batches:
        if strategy is None or way == "outside":
            seen.append(step(x))
        else:
            # Of a single example the last replica takes it, and the first one sits out.
            options = mirror.InputOptions(weights=[1, 1, 2])
            (part,) = strategy.distribute_dataset([x], options)
            of_replicas = strategy.local_results(strategy.run(step, args=(part,)))
            assert all(torch.equal(one, of_replicas[0]) for one in of_replicas)
            seen.append(of_replicas[0])
    return [p.detach().clone() for p in model.parameters()], seen


@pairwise(
    kind=["pre", "post"],
    hook=[slow_down, slow_down_in_place, limit],
    way=["inside", "outside"],
    schedule=["lockstep", "staggered"],
)
def test_hooks_of_steps_change_options_as_on_one_device(make_strategy, schedule, way, hook, kind):
    plain = nn.Linear(3, 2).double()
    rate = torch.tensor(0.5) if hook is slow_down_in_place else 0.5
    batches = [torch.randn(size, 3).double() for size in (6, 7, 1, 5)]
    strategy = make_strategy(3, schedule=schedule)
    model = strategy.mirror(copy.deepcopy(plain))

    def prepare(optimizer):
        getattr(optimizer, f"register_step_{kind}_hook")(hook)

    expected = trained(plain, None, way, prepare, batches, copy.deepcopy(rate))
    actual = trained(model, strategy, way, prepare, batches, rate)
    torch.testing.assert_close(actual, expected)
    strategy.check_replicas()


@pytest.mark.parametrize("schedule", ["lockstep", "staggered"])
@pytest.mark.parametrize("kind", ["pre", "post"])
def test_hooks_of_steps_that_change_a_rate_differently_are_told(make_strategy, schedule, kind):
    def each(optimizer, args, kwargs):
        optimizer.param_groups[0]["lr"] = 0.1 * (1 + here())

    strategy = make_strategy(3, schedule=schedule)
    model = strategy.mirror(nn.Linear(3, 2))
    batches = [torch.randn(6, 3)]

    def prepare(optimizer):
        getattr(optimizer, f"register_step_{kind}_hook")(each)

    with pytest.raises(mirror.StrategyError, match=r"'lr' of parameter group 0 of SGD.*after a"):
        trained(model, strategy, "inside", prepare, batches, 0.1)
