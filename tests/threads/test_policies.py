"""mirror/threads/policies.py: what "auto" may choose is not seen but in speed."""

import copy

import pytest
import torch
from torch import nn

from mirror.replica.gradients.parallel_backward import ParallelBackward
from mirror.threads import policies
from mirror.threads.autotune import WARM
from mirror.threads.policies import (
    AT_ONCE,
    BACKWARD_AT_ONCE,
    ENDING_TEAMS,
    IN_TURN,
    Schedule,
    policies_of,
)
from tests.oracle import train

STEPS = 4


@pytest.mark.parametrize(
    ("schedule", "num_threads", "num_cpus", "expected"),
    [
        ("auto", 1, 1, (IN_TURN,)),
        ("auto", 1, 2, (IN_TURN, BACKWARD_AT_ONCE)),
        ("auto", 2, 2, (IN_TURN, ENDING_TEAMS)),
        ("auto", 2, 4, (IN_TURN, ENDING_TEAMS, BACKWARD_AT_ONCE)),
        ("concurrent", 1, 2, (AT_ONCE, IN_TURN)),
        ("concurrent", 2, 2, (AT_ONCE, ENDING_TEAMS)),
    ],
)
def test_what_a_schedule_chooses_from(monkeypatch, schedule, num_threads, num_cpus, expected):
    monkeypatch.setattr(policies, "release_thread_pool", lambda: None)
    assert policies_of(schedule, num_threads=num_threads, num_cpus=num_cpus) == expected


def test_nobody_ends_teams_where_openmp_cannot(monkeypatch):
    monkeypatch.setattr(policies, "release_thread_pool", None)
    assert policies_of("auto", num_threads=2, num_cpus=2) == (IN_TURN,)


@pytest.mark.parametrize("schedule", ["lockstep", "staggered"])
def test_other_schedules_have_nothing_to_choose(schedule):
    assert len(policies_of(schedule, num_threads=2, num_cpus=8)) == 1
    assert not Schedule(schedule).is_measured


@pytest.fixture
def only(monkeypatch):
    """Gives ``only(*manners)``: has all schedules made from then on choose from these."""

    def only(*them):
        monkeypatch.setattr(policies, "policies_of", lambda *_, **__: them)

    return only


@pytest.fixture
def passes(monkeypatch):
    """The numbers of replicas of the backward passes that came apart."""
    numbers, run = [], ParallelBackward.run

    def counting(self, tasks):
        numbers.append(len(tasks))
        run(self, tasks)

    monkeypatch.setattr(ParallelBackward, "run", counting)
    return numbers


class Noting(nn.Module):
    """Draws, and notes what it meets in lists that all replicas share."""

    def __init__(self, hooks):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.Dropout(), nn.Tanh(), nn.Linear(8, 1))
        self.hooks, self.seen = hooks, []

    def forward(self, x):
        self.seen.append(("forward", float(x.sum())))
        hidden = self.layers[:3](x)
        if self.hooks == "of tensors":
            hidden.register_hook(lambda grad: self.seen.append(("tensor", float(grad.sum()))))
        elif self.hooks == "of nodes":
            hidden.grad_fn.register_hook(lambda *grads: self.seen.append(("node", len(grads))))
            hidden.grad_fn.register_prehook(lambda grads: self.seen.append(("before", len(grads))))
        elif self.hooks == "of modules":
            self.layers[3].register_full_backward_hook(lambda *_: self.seen.append("module"))
        return self.layers[3](hidden)


def trained(strategy, way, hooks=""):
    model = strategy.mirror(Noting(hooks))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(2)
    batches = [(torch.randn(7, 3), torch.randn(7, 1)) for _ in range(STEPS)]
    train(way, strategy, model, optimizer, batches, lambda m, b: (m(b[0]) - b[1]).square().mean())
    seen = copy.copy(model.seen)
    return [*(p.detach().clone() for p in model.parameters()), torch.rand(3)], seen


def assert_equal_bits(found, expected):
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("way", [1, 2, 3])
@pytest.mark.parametrize("manner", [IN_TURN, ENDING_TEAMS, BACKWARD_AT_ONCE], ids=lambda m: m.name)
def test_no_manner_of_auto_is_seen(make_strategy, only, passes, manner, way, n):
    expected, order = trained(make_strategy(n, schedule="lockstep"), way)
    only(manner)
    found, own_order = trained(make_strategy(n), way)
    assert_equal_bits(found, expected)
    assert own_order == order
    # Mirroring makes hooks; the program is taken to make none when the first steps are over.
    assert passes == ([n] * (STEPS - WARM) if manner.passes_at_once and way != 3 else [])


@pytest.mark.parametrize("hooks", ["of tensors", "of nodes", "of modules"])
def test_passes_with_hooks_are_left_whole(make_strategy, only, passes, hooks):
    expected, order = trained(make_strategy(2, schedule="lockstep"), 1, hooks)
    only(BACKWARD_AT_ONCE)
    found, own_order = trained(make_strategy(2), 1, hooks)
    assert_equal_bits(found, expected)
    assert own_order == order
    assert not passes


def test_hooks_from_before_the_decision_do_not_keep_passes_whole(make_strategy, only, passes):
    only(IN_TURN, BACKWARD_AT_ONCE)
    strategy = make_strategy(2)
    model = strategy.mirror(nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    model.register_forward_hook(lambda *_: seen.append(1))
    for _ in range(10):
        optimizer.zero_grad()
        model(torch.ones(4, 3)).sum().backward()
        optimizer.step()
    assert passes == [2] * 4
    assert len(seen) == 20


def test_steps_of_another_number_of_threads_begin_anew():
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        now = [0.0]
        schedule = Schedule("auto", clock=lambda: now[0])
        for _ in range(2 + 4):
            schedule.step_ended()
        assert schedule.manner is not IN_TURN or policies.release_thread_pool is None
        torch.set_num_threads(3)
        schedule.step_ended()
        assert schedule.manner is IN_TURN
    finally:
        torch.set_num_threads(before)


def test_auto_on_one_simulated_device_measures_nothing(make_strategy):
    for schedule in ("auto", "staggered"):
        assert not make_strategy(1, schedule=schedule)._group.runner.schedule.is_measured
    assert make_strategy(2)._group.runner.schedule.is_measured
