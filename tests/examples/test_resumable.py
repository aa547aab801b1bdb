"""A training that is killed at random steps ends with the bits of one that is not."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def lines_of(*command):
    done = subprocess.run(
        [sys.executable, "-W", "error", *map(str, command)],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        timeout=600,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def test_two_kills_leave_the_same_bits(tmp_path):
    program = ROOT / "tests" / "examples" / "killed.py"
    undisturbed, killed = lines_of(program, tmp_path, "7:SIGKILL", "20:SIGTERM")
    assert undisturbed == killed
    assert undisturbed.startswith("done ")


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_many_kills_leave_the_same_bits(seed):
    example = ROOT / "examples" / "resumable.py"
    assert lines_of(example, "--kills", 8, "--seed", seed)[-1] == "the same bits"
