"""Parallel replicas among threads, collections, interrupts and errors train as lockstep."""

import subprocess
import sys
from pathlib import Path

import pytest

SECONDS = 30


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1], ids=["each replica steps", "one replica steps"])
def test_stress_ends_without_a_hang_or_a_difference(seed):
    done = subprocess.run(
        [sys.executable, "-m", "tests.threads.parallel_stress", str(SECONDS), str(seed)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=SECONDS + 300,
    )
    assert done.stdout.endswith("done\n"), done.stderr
