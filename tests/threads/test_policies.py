"""The schedules: policies, the autotuner, and turns that are taken at once."""

import copy
import logging
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from mirror.replica.gradients.parallel_backward import ParallelBackward
from mirror.threads import policies
from mirror.threads.policies import (
    AT_ONCE,
    BACKWARD_AT_ONCE,
    ENDING_TEAMS,
    HELD,
    IN_TURN,
    LOOKS,
    WARM,
    Autotuner,
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
    found, own_order = trained(make_strategy(n, schedule="auto"), way)
    assert_equal_bits(found, expected)
    assert own_order == order
    # Mirroring makes hooks; the program is taken to make none when the first steps are over.
    assert passes == ([n] * (STEPS - WARM) if manner.passes_at_once and way != 3 else [])


@pytest.mark.parametrize("hooks", ["of tensors", "of nodes", "of modules"])
def test_passes_with_hooks_are_left_whole(make_strategy, only, passes, hooks):
    expected, order = trained(make_strategy(2, schedule="lockstep"), 1, hooks)
    only(BACKWARD_AT_ONCE)
    found, own_order = trained(make_strategy(2, schedule="auto"), 1, hooks)
    assert_equal_bits(found, expected)
    assert own_order == order
    assert not passes


def test_hooks_from_before_the_decision_do_not_keep_passes_whole(make_strategy, only, passes):
    only(IN_TURN, BACKWARD_AT_ONCE)
    strategy = make_strategy(2, schedule="auto")
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
        assert schedule.policy is not IN_TURN or policies.release_thread_pool is None
        torch.set_num_threads(3)
        schedule.step_ended()
        assert schedule.policy is IN_TURN
    finally:
        torch.set_num_threads(before)


def test_auto_on_one_simulated_device_measures_nothing(make_strategy):
    for schedule in ("auto", "staggered"):
        assert not make_strategy(1, schedule=schedule)._group.runner.schedule.is_measured
    assert make_strategy(2, schedule="auto")._group.runner.schedule.is_measured


A, B, C = (SimpleNamespace(name=name) for name in "ABC")


class Program:
    """Takes steps that last as long as ``seconds(manner, number of the step)`` says."""

    def __init__(self, seconds, manners=(A, B)):
        self.now, self.seconds, self.manners = 0.0, seconds, manners
        self.contest = Autotuner(lambda: self.manners, clock=lambda: self.now)
        self.taken = ""

    def take(self, count, size=64.0):
        for _ in range(count):
            manner = self.contest.now.name
            self.now += self.seconds(manner, len(self.taken))
            self.taken += manner
            self.contest.step_ended(size)
        return self.taken[-count:]


def costs(**seconds):
    return lambda manner, step: seconds[manner]


def test_each_manner_gets_four_steps_and_the_fastest_the_next_thousand():
    program = Program(costs(A=2, B=1))
    assert program.take(10) == "AA" + "AAAA" + "BBBB"
    assert program.take(HELD) == "B" * HELD
    assert program.take(8) == "AAAABBBB"


@pytest.mark.parametrize("first", [3, 10, 50])
def test_it_is_never_over_a_twentieth_slower_than_the_best(first):
    # The whole program, its trials and all that is tried again included.
    program = Program(costs(A=first, B=10, C=17), (A, B, C))
    program.take(10 * HELD)
    assert program.now <= 1.05 * len(program.taken) * min(first, 10)


def test_the_first_one_is_kept_where_the_others_gain_next_to_nothing():
    program = Program(costs(A=1.0, B=0.98))
    assert set(program.take(200)[WARM + 2 * LOOKS :]) == {"A"}


def test_the_fastest_step_of_each_counts():
    # Others' work on the machine makes most of B's steps slow.
    def seconds(manner, step):
        return 2 if manner == "A" else 1 if step % 4 == 0 else 9

    assert Program(seconds).take(30)[-1] == "B"


def test_steps_of_another_size_are_not_compared():
    # The last batch of an epoch is small, and quick in every manner.
    program = Program(lambda manner, step: 0.1 if step % 5 == 4 else {"A": 1, "B": 2}[manner])
    for _ in range(8):
        program.take(4)
        program.take(1, size=3.0)
    assert program.take(1) == "A"
    assert "BBBB" in program.taken


def test_it_is_decided_anew_for_a_size_that_stays_unlike():
    program = Program(lambda manner, step: {"A": 2 - (step > 30), "B": 1.5}[manner])
    assert program.take(30)[-1] == "B"
    assert program.take(3, size=128.0) + program.take(3) == "BBBBBB"  # not so large; not for long
    for _ in range(3):
        program.take(1, size=3.0)
    assert program.take(20)[-1] == "B"
    assert program.take(20, size=300.0) == "BBBB" + "AAAABBBB" + "A" * 8


def test_it_is_decided_anew_where_the_machine_has_changed():
    # From the 60th step on B takes three times as long as it did; what A takes is known.
    program = Program(lambda manner, step: 2 if manner == "A" else 3 if step >= 60 else 1)
    assert program.take(60)[-1] == "B"
    program.take(50)
    assert "BAAAABBBBAAAA" in program.taken[60:]
    assert program.taken[-1] == "A"


def test_what_is_slower_for_all_is_decided_anew_once():
    program = Program(lambda manner, step: (3 if step >= 60 else 1) * {"A": 1, "B": 2}[manner])
    assert program.take(500).count("B") == 2 * LOOKS


def test_what_changes_its_size_with_every_step_stays_as_it_is():
    program = Program(costs(A=2, B=1))
    for step in range(50):
        program.take(1, size=step)
    assert set(program.taken) == {"A"}


def test_a_program_of_sizes_unknown_is_measured_too():
    program = Program(costs(A=2, B=1))
    assert program.take(30, size=0.0)[-1] == "B"


def test_where_there_is_one_manner_nothing_is_tried_or_told(caplog):
    caplog.set_level(logging.INFO, "mirror")
    program = Program(costs(A=2), (A,))
    assert program.take(2 * HELD) == "A" * 2 * HELD
    assert not caplog.records


def test_the_choice_is_told_with_what_it_rests_on(caplog):
    caplog.set_level(logging.INFO, "mirror")
    Program(costs(A=0.002, B=0.001)).take(10)
    (record,) = caplog.records
    message = record.getMessage()
    assert "the replicas B from now on" in message
    assert "2 ms where they A, 1 ms where they B" in message
    assert "64 examples" in message
