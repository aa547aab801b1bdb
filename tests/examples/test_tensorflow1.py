"""The programs of docs/tensorflow1.md run, each as a process of its own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "tensorflow1.md").read_text()
HEAD, *PROGRAMS = re.findall(r"```python\n(.*?)```", PAGE, re.S)
TITLES = re.findall(r"^## (.*)$", PAGE, re.M)
TORCHRUN = "-m torch.distributed.run --standalone --nproc-per-node 2".split()


def test_there_is_a_program_per_section():
    assert len(PROGRAMS) == len(TITLES) > 7
    assert PAGE.count("```") == 2 * (len(PROGRAMS) + 1)


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS, ids=TITLES)
def test_the_program_runs_as_printed(program, tmp_path, forks):
    file = tmp_path / "program.py"
    file.write_text(f"{HEAD}\n{program}")
    if "torchrun" not in program:
        done = forks.run(file.read_text())
    else:
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
        done = subprocess.run(
            [sys.executable, *TORCHRUN, str(file)], env=environ, capture_output=True, text=True
        )
    assert done.returncode == 0, done.stderr
