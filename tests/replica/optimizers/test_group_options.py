"""Options of optimizers and schedulers that replicas change inside ``run``."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import mirror
from tests.oracle import assert_same, assert_same_training, in_run
from tests.pairs import each_once, pairwise
from tests.toy_models import replica_id


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
    if replica_id() == 1:
        group["lr"] = 9.0


def each_its_own(group):
    group["lr"] = 0.1 * (1 + replica_id())


def all_alike(group):
    group["lr"] = 0.3


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("change", [decay, one_alone, each_its_own])
def test_replicas_that_change_a_rate_differently_are_reported(make_strategy, change, when):
    with pytest.raises(mirror.StrategyError, match=r"'lr' of parameter group 0 of SGD"):
        run(make_strategy(3), change, when)


@pytest.mark.parametrize("schedule", ["lockstep", "staggered"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_replicas_may_change_a_rate_equally(make_strategy, schedule, when):
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
        replica = 0 if strategy is None else replica_id()
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
def test_a_later_replica_that_changes_a_rate_alone_is_reported(make_strategy, kind, when, who):
    with pytest.raises(mirror.StrategyError, match="'lr' of parameter group 0"):
        rated(make_strategy(3), kind, when, who)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("when", ["at the start", "before"])
def test_the_first_replica_that_changes_a_rate_alone_does_what_one_device_does(
    make_strategy, kind, when
):
    expected = rated(None, kind, when, 0)
    torch.testing.assert_close(rated(make_strategy(3), kind, when, 0), expected)


def test_a_rate_of_a_wrapper_that_is_no_optimizer_is_reported(make_strategy):
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


@pytest.mark.replicated_state
@pytest.mark.parametrize("schedule", ["lockstep", "staggered"])
@pytest.mark.parametrize("kind", ["pre", "post"])
def test_hooks_of_steps_that_change_a_rate_differently_are_reported(make_strategy, schedule, kind):
    def each(optimizer, args, kwargs):
        optimizer.param_groups[0]["lr"] = 0.1 * (1 + replica_id())

    strategy = make_strategy(3, schedule=schedule)
    model = strategy.mirror(nn.Linear(3, 2))
    batches = [torch.randn(6, 3)]

    def prepare(optimizer):
        getattr(optimizer, f"register_step_{kind}_hook")(each)

    with pytest.raises(mirror.StrategyError, match=r"'lr' of parameter group 0 of SGD.*after a"):
        trained(model, strategy, "inside", prepare, batches, 0.1)


SIZES = [7, 5, 2, 8, 6]
S = lr_scheduler
SCHEDULERS = {
    "LambdaLR": lambda o: S.LambdaLR(o, lambda epoch: 0.9**epoch),
    "MultiplicativeLR": lambda o: S.MultiplicativeLR(o, lambda epoch: 0.9),
    "StepLR": lambda o: S.StepLR(o, 2, 0.5),
    "MultiStepLR": lambda o: S.MultiStepLR(o, [1, 3], 0.5),
    "ConstantLR": lambda o: S.ConstantLR(o, 0.5, 2),
    "LinearLR": lambda o: S.LinearLR(o, 0.5, 1.0, 3),
    "ExponentialLR": lambda o: S.ExponentialLR(o, 0.8),
    "PolynomialLR": lambda o: S.PolynomialLR(o, 4, 2.0),
    "CosineAnnealingLR": lambda o: S.CosineAnnealingLR(o, 4),
    "CosineAnnealingWarmRestarts": lambda o: S.CosineAnnealingWarmRestarts(o, 2),
    "CyclicLR": lambda o: S.CyclicLR(o, 0.01, 0.1, 2),
    "OneCycleLR": lambda o: S.OneCycleLR(o, 0.1, total_steps=6),
    "SequentialLR": lambda o: S.SequentialLR(
        o, [S.ConstantLR(o, 0.5, 2), S.ExponentialLR(o, 0.8)], [2]
    ),
    "ChainedScheduler": lambda o: S.ChainedScheduler(
        [S.ConstantLR(o, 0.5, 2), S.ExponentialLR(o, 0.8)]
    ),
    "ReduceLROnPlateau": lambda o: S.ReduceLROnPlateau(o, patience=1, threshold=0.5),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.01, anneal_epochs=3),
    "own": lambda o: Halving(o),
}


class Halving(lr_scheduler.LRScheduler):
    """Counts in Python of its own and sets the rate itself."""

    def __init__(self, optimizer):
        self.calls = 0
        super().__init__(optimizer)

    def step(self, epoch=None):
        self.calls += 1
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.5
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]


def batches():
    return [torch.randn(size, 3) for size in SIZES]


def loss_of(model, x):
    return (model(x) - 1).square().mean()


def step_of(model, optimizer, scheduler):
    def step(x):
        optimizer.zero_grad()
        loss = loss_of(model, x)
        loss.backward()
        optimizer.step()
        if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
            scheduler.step(loss.detach())
        else:
            scheduler.step()

    return step


def pair(strategy, make_scheduler):
    plain = nn.Linear(3, 2)
    model = strategy.mirror(copy.deepcopy(plain))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (plain, model)]
    schedulers = [make_scheduler(optimizer) for optimizer in optimizers]
    return list(zip((plain, model), optimizers, schedulers, strict=True))


def counts(scheduler):
    """What a scheduler has counted; without infinities, which have no difference."""
    return {
        name: value
        for name, value in scheduler.state_dict().items()
        if isinstance(value, (int, float)) and math.isfinite(value)
    }


def test_every_scheduler_of_torch_is_here():
    known = {*SCHEDULERS, "LRScheduler"}
    assert set(lr_scheduler.__all__) <= known


@each_once(name=SCHEDULERS, schedule=["lockstep", "staggered"])
def test_a_scheduler_in_run_is_that_of_one_device(make_strategy, name, schedule):
    strategy = make_strategy(3, schedule=schedule)
    plain, mirrored = pair(strategy, SCHEDULERS[name])
    steps = step_of(*plain), step_of(*mirrored)
    for batch in batches():
        steps[0](batch)
        in_run(strategy, steps[1], batch)
        strategy.check_replicas()
        assert_same(mirrored[2].get_last_lr(), plain[2].get_last_lr())
    assert_same_training(*mirrored[:2], *plain[:2])
    assert_same(counts(mirrored[2]), counts(plain[2]))


def test_metrics_that_differ_are_refused(make_strategy):
    strategy = make_strategy(3)
    _, (_, optimizer, scheduler) = pair(strategy, SCHEDULERS["ReduceLROnPlateau"])

    def step(make_metric):
        context = mirror.get_replica_context()
        scheduler.step(make_metric(context))

    strategy.run(lambda: step(lambda context: 1.0))
    strategy.run(lambda: step(lambda context: math.nan))
    with pytest.raises(mirror.StrategyError, match=r"ReduceLROnPlateau\.step.*0\.0, 1\.0, 2\.0"):
        strategy.run(lambda: step(lambda context: float(context.replica_id_in_sync_group)))
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_a_scheduler_that_one_replica_alone_steps_diverges(make_strategy):
    strategy = make_strategy(2)
    _, (_, _, scheduler) = pair(strategy, SCHEDULERS["StepLR"])

    def step():
        if mirror.get_replica_context().replica_id_in_sync_group == 1:
            scheduler.step()

    with pytest.raises(mirror.DivergenceError, match=r"StepLR\.step"):
        strategy.run(step)


def test_a_scheduler_made_in_run_is_refused(make_strategy):
    strategy = make_strategy(2)
    _, (_, optimizer, _) = pair(strategy, SCHEDULERS["StepLR"])
    with pytest.raises(mirror.StrategyError, match="make it outside"):
        strategy.run(lambda: lr_scheduler.StepLR(optimizer, 1).last_epoch)


def test_a_scheduler_of_an_optimizer_that_is_not_mirrored_is_each_replicas_own(make_strategy):
    def own():
        optimizer = torch.optim.SGD([torch.ones(1)], lr=1.0)
        scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
        optimizer.step()
        scheduler.step()
        return scheduler.get_last_lr()[0]

    assert make_strategy(2).run(own).values == (0.5, 0.5)


@pytest.mark.parametrize("way", [1, 2])
def test_outside_run_nothing_changes(make_strategy, way):
    strategy = make_strategy(3)
    plain, (model, optimizer, scheduler) = pair(strategy, SCHEDULERS["SequentialLR"])
    for batch in batches():
        step_of(*plain)(batch)
        if way == 1:
            step_of(model, optimizer, scheduler)(batch)
            continue
        losses = in_run(strategy, lambda x: loss_of(model, x), batch)
        optimizer.zero_grad()
        strategy.reduce("mean", losses).backward()
        optimizer.step()
        scheduler.step()
    assert_same_training(model, optimizer, *plain[:2])
