"""mirror/threads/autotune.py: the fastest manner, by an injected clock."""

import logging
from types import SimpleNamespace

import pytest

from mirror.threads.autotune import HELD, LOOKS, WARM, Autotuner

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
