"""Ctrl-C ends the run it comes in, and nothing else."""

from pathlib import Path

import pytest

from tests.threads.interrupts import CASES


@pytest.fixture(scope="module")
def interrupted(script_pool):
    """Gives ``interrupted(schedule)``: what interrupts.py says of every case."""
    known = {}

    def run(schedule):
        if schedule not in known:
            done = script_pool.run(Path(__file__).with_name("interrupts.py").read_text(), schedule)
            assert done.returncode == 0, done.stderr
            lines = (line.split(maxsplit=1) for line in done.stdout.splitlines())
            known[schedule] = dict(lines)
        return known[schedule]

    return run


@pytest.mark.parametrize("schedule", ["lockstep", "staggered"])
@pytest.mark.parametrize("case", [case.__name__ for case in CASES])
def test_an_interrupt_ends_the_run_and_nothing_else(interrupted, schedule, case):
    assert interrupted(schedule)[case] == "KeyboardInterrupt True ends"
