"""Every program in examples/ runs: as a user would run it, and shortened."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ELSEWHERE = ("ray_train",)  # needs Ray: tests/examples/test_ray_train.py
FOUND = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))
EXAMPLES = [path for path in FOUND if path.stem not in ELSEWHERE]
SHORTENED = {"resumable": ["--kills", "1"]}
PROGRAM = """
import os, runpy, sys
path = sys.argv.pop(1)
os.chdir(os.path.dirname(path))
runpy.run_path(path, run_name="__main__")
"""


def test_there_are_examples():
    assert EXAMPLES
    for name in ELSEWHERE:
        assert (Path(__file__).parent / f"test_{name}.py").exists()


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_of_few_epochs_runs_without_a_warning(path, tmp_path, forks):
    copy = tmp_path / path.name
    copy.write_text(re.sub(r"^NUM_EPOCHS = \d+$", "NUM_EPOCHS = 2", path.read_text(), flags=re.M))
    done = forks.run(PROGRAM, copy, *SHORTENED.get(path.stem, ()))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs_without_a_warning(path, tmp_path):
    command = [sys.executable, "-W", "error", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=180)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout
