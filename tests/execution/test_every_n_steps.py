"""mirror/execution/every_n_steps.py: after so many steps, between runs."""

import pytest
import torch
from torch import nn

from mirror.execution.every_n_steps import EveryNSteps
from tests.oracle import train

BATCH = (torch.ones(4, 2), torch.ones(4, 1))


def loss_fn(model, batch):
    return nn.functional.mse_loss(model(batch[0]), batch[1])


@pytest.fixture
def seen(make_strategy):
    """A strategy, and after which steps, and in what state, something is called every two."""
    strategy, calls = make_strategy(2), []
    runner = strategy._group.runner
    every = EveryNSteps(
        2, runner, lambda: calls.append((every.num_steps_done, runner.is_between_runs))
    )
    return strategy, calls


def made(strategy, kind=torch.optim.SGD):
    with strategy.scope():
        model = nn.Linear(2, 1)
        return model, kind(model.parameters(), lr=0.1)


@pytest.mark.parametrize("way", [1, 2, 3])
def test_steps_are_counted_in_every_way(seen, way):
    strategy, calls = seen
    train(way, strategy, *made(strategy), [BATCH] * 5, loss_fn)
    assert calls == [(2, True), (4, True)]


def test_a_run_without_a_step_is_none(seen):
    strategy, calls = seen
    for _ in range(5):
        strategy.run(lambda: None)
    assert calls == []


class Foreign(torch.optim.SGD):
    """Steps once, in the cross-replica context, inside ``run``."""

    def __init__(self, params, lr):
        super().__init__(params, lr)
        self.unknown = object()

    def step(self, closure=None):
        return super().step(closure)


def test_what_is_due_inside_a_run_is_done_when_it_has_ended(seen):
    strategy, calls = seen
    train(3, strategy, *made(strategy, Foreign), [BATCH] * 4, loss_fn)
    assert calls
    assert all(is_between_runs for _, is_between_runs in calls)


def test_what_fails_says_when_and_is_done_again(make_strategy):
    strategy, errors = make_strategy(2), []

    def fail():
        raise ValueError("no")

    EveryNSteps(2, strategy._group.runner, fail)
    model, optimizer = made(strategy)
    for _ in range(4):
        try:
            train(1, strategy, model, optimizer, [BATCH], loss_fn)
        except ValueError as error:
            errors.append(error.__notes__)
    assert errors == [
        ["found after step 2; looked at before: never"],
        ["found after step 4; looked at before: after step 2"],
    ]
