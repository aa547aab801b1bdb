"""A scheduler stepped by every replica inside ``run`` counts once."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import mirror
from tests.oracle import assert_same, assert_same_training, in_run

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
    """What a scheduler has counted; without infinities, whose difference is none."""
    return {
        name: value
        for name, value in scheduler.state_dict().items()
        if isinstance(value, (int, float)) and math.isfinite(value)
    }


def test_every_scheduler_of_torch_is_here():
    known = {*SCHEDULERS, "LRScheduler"}
    assert set(lr_scheduler.__all__) <= known


@pytest.mark.parametrize("schedule", ["lockstep", "staggered"])
@pytest.mark.parametrize("name", SCHEDULERS)
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
