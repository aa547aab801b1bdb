"""The ends of steps: timeline, guards and listeners, and hooks every n steps."""

import pytest
import torch
from torch import nn

import mirror
from mirror.execution.lifecycle import step_ends
from mirror.execution.run import current
from mirror.execution.runner import EveryNSteps
from mirror.replica.optimizers.step_interceptor import watch_optimizer_steps
from tests.oracle import train

BATCH = (torch.ones(4, 2), torch.ones(4, 1))


class Ends:
    """Counts the calls of each listener."""

    def __init__(self, strategy):
        self.strategy, self.listened = strategy, 0
        self.guard = EveryNSteps(1000, strategy._group.runner, lambda: None)

    def listen(self):
        # Nothing is half done: runs may begin.
        self.strategy.run(lambda: None)
        self.listened += 1

    @property
    def counts(self):
        return [len(self.strategy._group.replicas.timeline.steps), self.guard.num_steps_done,
                self.listened]  # fmt: skip


@pytest.fixture
def ends(make_strategy, monkeypatch):
    ends = Ends(make_strategy(2))
    monkeypatch.setattr(step_ends, "listeners", [ends.listen])
    return ends


def loss_fn(model, batch):
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def trained(strategy, num_optimizers=1):
    model = strategy.mirror(nn.Linear(2, 1))
    return model, *(torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(num_optimizers))


@pytest.mark.parametrize("way", [1, 2, 3])
def test_every_listener_is_called_once_per_step(ends, way):
    train(way, ends.strategy, *trained(ends.strategy), [BATCH] * 3, loss_fn)
    assert ends.counts == [3, 3, 3]


def test_two_optimizers_in_a_run_end_one_step_and_outside_two(ends):
    model, *optimizers = trained(ends.strategy, 2)

    def step():
        loss_fn(model, BATCH).backward()
        for optimizer in optimizers:
            optimizer.step()

    ends.strategy.run(step)
    assert ends.counts == [1, 1, 1]
    step()
    assert ends.counts == [3, 3, 3]


class Twice(torch.optim.SGD):
    """Steps once more inside its step."""

    def __init__(self, params):
        super().__init__(params, lr=0.1)
        self.inner = torch.optim.SGD(params, lr=0.1)

    def step(self, closure=None):
        self.inner.step()
        return super().step(closure)


def test_a_listener_sees_the_gradients_before_each_step_that_is_not_part_of_another(
    ends, monkeypatch
):
    model, _ = trained(ends.strategy)
    (weight, bias), seen = model.parameters(), []
    optimizer = Twice([weight, bias])
    before = weight.detach().clone()

    def see(stepped):
        seen.append((stepped, current.replica and current.replica.replica_id))
        assert weight.grad is not None
        assert torch.equal(weight, before)

    monkeypatch.setattr(step_ends, "before_optimizer", [see])
    loss_fn(model, BATCH).backward()
    optimizer.step()
    assert seen == [(optimizer, None)]
    before = weight.detach().clone()
    seen.clear()

    def step():
        loss_fn(model, BATCH).backward()
        optimizer.step()

    ends.strategy.run(step)
    assert sorted(replica_id for _, replica_id in seen) == [0, 1]


def test_a_step_in_a_merge_or_a_run_inside_ends_with_the_whole_run(ends):
    model, optimizer = trained(ends.strategy)
    loss_fn(model, BATCH).backward()

    def inside(strategy):
        strategy.run(optimizer.step)
        assert ends.counts == [0, 0, 0]

    ends.strategy.run(lambda: mirror.get_replica_context().merge_call(inside))
    assert ends.counts == [1, 1, 1]


def test_a_run_that_fails_ends_none(ends):
    model, optimizer = trained(ends.strategy)

    def step():
        loss_fn(model, BATCH).backward()
        optimizer.step()
        raise RuntimeError("it failed")

    with pytest.raises(RuntimeError, match="it failed"):
        ends.strategy.run(step)
    ends.strategy.run(lambda: None)
    assert ends.counts == [0, 0, 0]


def test_listeners_are_also_called_for_steps_without_a_strategy(monkeypatch):
    heard = []
    monkeypatch.setattr(step_ends, "listeners", [lambda: heard.append(1)])
    watch_optimizer_steps(are_mirrored=False)
    weight = nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    torch.optim.SGD([weight], lr=0.1).step()
    assert heard == [1]


@pytest.fixture
def calls_seen(make_strategy):
    """A strategy, and after which steps, and in what state, something is called every two."""
    strategy, calls = make_strategy(2), []
    runner = strategy._group.runner
    every = EveryNSteps(
        2, runner, lambda: calls.append((every.num_steps_done, runner.is_between_runs))
    )
    return strategy, calls


def make_training(strategy, kind=torch.optim.SGD):
    with strategy.scope():
        model = nn.Linear(2, 1)
        return model, kind(model.parameters(), lr=0.1)


@pytest.mark.parametrize("way", [1, 2, 3])
def test_steps_are_counted_in_every_way(calls_seen, way):
    strategy, calls = calls_seen
    train(way, strategy, *make_training(strategy), [BATCH] * 5, loss_fn)
    assert calls == [(2, True), (4, True)]


def test_a_run_without_a_step_is_none(calls_seen):
    strategy, calls = calls_seen
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


def test_what_is_due_inside_a_run_is_done_when_it_has_ended(calls_seen):
    strategy, calls = calls_seen
    train(3, strategy, *make_training(strategy, Foreign), [BATCH] * 4, loss_fn)
    assert calls
    assert all(is_between_runs for _, is_between_runs in calls)


def test_what_fails_says_when_and_is_done_again(make_strategy):
    strategy, errors = make_strategy(2), []

    def fail():
        raise ValueError("no")

    EveryNSteps(2, strategy._group.runner, fail)
    model, optimizer = make_training(strategy)
    for _ in range(4):
        try:
            train(1, strategy, model, optimizer, [BATCH], loss_fn)
        except ValueError as error:
            errors.append(error.__notes__)
    assert errors == [
        ["found after step 2; looked at before: never"],
        ["found after step 4; looked at before: after step 2"],
    ]
