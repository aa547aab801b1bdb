"""Options of an optimizer that replicas change inside ``run``: alike, or told."""

import pytest
import torch
from torch import nn

import mirror


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
