"""An interrupt anywhere ends the step it comes in, and nothing else: the program trains on.

``drive.py`` raises in turn at entries and returns of functions, mirror's, torch's and the user's,
in the main thread and in the replicas'. After each: no hang, no thread or lock left; replicas are
equal; parameters and optimizer are as before the step or as after it, or the error says that they
may be partly updated; the next steps give the numbers of a program that was not interrupted.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.interrupts.programs import programs

ROOT = Path(__file__).parents[2]


def findings(how, which, times, seconds):
    done = subprocess.run(
        [sys.executable, "-m", "tests.interrupts.drive", how, *which, "--times", str(times)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert done.stdout.endswith("done\n"), done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if line.startswith("-")]


def test_an_interrupt_at_some_points_ends_the_step_and_nothing_else():
    which = [str(i) for i in range(len(programs()))]
    assert findings("points", which, 2, 400) == []


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(
    "which",
    range(len(programs())),
)
def test_an_interrupt_at_any_point_ends_the_step_and_nothing_else(which):
    assert findings("points", [str(which)], 700, 600) == []


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("which", range(len(programs())))
def test_a_signal_at_any_moment_ends_the_step_and_nothing_else(which):
    assert findings("signals", [str(which)], 100, 300) == []
