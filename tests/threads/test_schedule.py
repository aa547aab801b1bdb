"""The schedules: backward passes at once under "auto", and teams of threads that end."""

import copy

import pytest
import torch
from torch import nn

from mirror.replica.gradients.parallel_backward import ParallelBackward
from mirror.threads import schedule as schedules
from mirror.threads.schedule import NUM_STEPS, Schedule
from tests.oracle import train
from tests.pairs import each_once

STEPS = NUM_STEPS + 3
LONG, SHORT = 0.02, 0.001  # seconds of passes


@pytest.fixture
def has_cpus(monkeypatch):
    """Lets this machine have as many CPUs as two replicas need."""
    monkeypatch.setattr(schedules, "_has_cpus", lambda: True)


@pytest.fixture
def all_are_long(monkeypatch, has_cpus):
    """Makes every step long enough for passes at once."""
    monkeypatch.setattr(schedules, "LONG_PASS_SECONDS", -1.0)
    monkeypatch.setattr(schedules, "SHORT_PASS_SECONDS", -1.0)


def after(*seconds, name="auto"):
    """Returns whether passes run at once after steps with passes of these durations."""
    schedule = Schedule(name)
    for one in seconds:
        schedule.end_step(one)
    return schedule.passes_at_once


def test_passes_run_at_once_after_four_long_steps(has_cpus):
    assert not after(*[LONG] * (NUM_STEPS - 1))
    assert after(*[LONG] * NUM_STEPS)
    assert not after(LONG, LONG, SHORT, LONG, LONG)  # a step with short passes is between
    assert after(LONG, SHORT, *[LONG] * NUM_STEPS)


def test_passes_that_get_short_take_turns_again(has_cpus):
    long = [LONG] * NUM_STEPS
    assert after(*long, *[LONG / 2] * 100)  # at once they take less time, which changes nothing
    assert after(*long, *[SHORT] * (NUM_STEPS - 1))
    assert not after(*long, *[SHORT] * NUM_STEPS)
    assert after(*long, *[SHORT] * NUM_STEPS, *long)


def test_passes_at_once_need_cpus_for_the_threads_of_each_replica(monkeypatch):
    monkeypatch.setattr(schedules.os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    for num_threads, expected in ((1, True), (2, False)):
        monkeypatch.setattr(torch, "get_num_threads", lambda n=num_threads: n)
        assert after(*[LONG] * NUM_STEPS) is expected
    schedule = Schedule("auto")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    for _ in range(NUM_STEPS):
        schedule.end_step(LONG)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    schedule.end_step(LONG)
    assert not schedule.passes_at_once


@pytest.mark.parametrize("name", ["lockstep", "staggered", "concurrent", "parallel"])
def test_only_auto_watches_the_length_of_passes(name):
    assert Schedule("auto").watches_passes
    assert not Schedule(name).watches_passes
    assert Schedule(name).may_go_backward_at_once() == (name != "lockstep")


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


@each_once(way=[1, 2, 3], n=[2, 3])
def test_passes_at_once_have_the_bits_and_the_order_of_turns(
    make_strategy, all_are_long, passes, way, n
):
    expected, order = trained(make_strategy(n, schedule="lockstep"), way)
    found, own_order = trained(make_strategy(n, schedule="auto"), way)
    assert_equal_bits(found, expected)
    assert own_order == order
    assert passes == ([n] * (STEPS - NUM_STEPS) if way != 3 else [])


@pytest.mark.parametrize("hooks", ["of tensors", "of nodes", "of modules"])
def test_passes_with_hooks_are_left_whole(make_strategy, all_are_long, passes, hooks):
    expected, order = trained(make_strategy(2, schedule="lockstep"), 1, hooks)
    found, own_order = trained(make_strategy(2, schedule="auto"), 1, hooks)
    assert_equal_bits(found, expected)
    assert own_order == order
    assert not passes


def test_hooks_from_before_the_decision_do_not_keep_passes_whole(
    make_strategy, all_are_long, passes
):
    strategy = make_strategy(2, schedule="auto")
    model = strategy.mirror(nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    model.register_forward_hook(lambda *_: seen.append(1))
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.ones(4, 3)).sum().backward()
        optimizer.step()
    assert passes == [2] * (STEPS - NUM_STEPS)
    assert len(seen) == 2 * STEPS


@pytest.fixture
def seconds(monkeypatch):
    """The seconds of passes that schedules have been told of, by step."""
    seconds, end_step = [], Schedule.end_step
    monkeypatch.setattr(
        Schedule, "end_step", lambda self, took: (seconds.append(took), end_step(self, took))
    )
    return seconds


@pytest.mark.usefixtures("all_are_long")
def test_the_passes_of_a_step_are_timed_in_turns_and_at_once(make_strategy, passes, seconds):
    trained(make_strategy(2, schedule="auto"), 1)
    assert 0 < len(passes) < STEPS
    assert len(seconds) == STEPS
    assert all(took > 0 for took in seconds)


def test_passes_inside_run_are_not_timed(make_strategy, seconds):
    trained(make_strategy(2, schedule="auto"), 3)
    assert seconds == [0] * STEPS
