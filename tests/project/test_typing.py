"""A type checker finds a typo in what is one of few words, and believes what is right."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PROGRAM = """
import torch

import mirror
from mirror import ReduceOp

strategy = mirror.MirroredStrategy(["cpu"] * 2, gradient_reduction="sum", schedule="lockstep")
strategy = mirror.MirroredStrategy(gradient_reduction="avg")  # wrong
strategy = mirror.MirroredStrategy(schedule="lock-step")  # wrong
mirror.CentralStorageStrategy(schedule="stagered")  # wrong
mirror.MultiWorkerMirroredStrategy(gradient_reduction="men")  # wrong


def step(x: torch.Tensor) -> torch.Tensor:
    context = mirror.get_replica_context()
    assert context is not None
    context.all_reduce("maen", x)  # wrong
    context.all_reduce(ReduceOp.MAX, x)
    return torch.as_tensor(context.all_reduce("sum", x))


strategy.compile(step, fallback="eager", mode="trace")
strategy.compile(step, fallback="ignore")  # wrong
strategy.compile(step, mode="eager")  # wrong
for op in ("sum", "MEAN", ReduceOp.PROD):
    print(op)
print(strategy.reduce("sum", 1), strategy.reduce("MEAN", 1), strategy.reduce(ReduceOp.MIN, 1))
print(strategy.reduce("average", 1))  # wrong
"""


@pytest.mark.slow  # mypy reads torch's sources, where `make lint` has not just done so
def test_a_typo_is_found_and_nothing_else(tmp_path):
    pytest.importorskip("mypy")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, "-m", "mypy", str(program)]  # as this project asks it: strictly
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    found = {int(line) for line in re.findall(r"program\.py:(\d+): error", done.stdout)}
    lines = enumerate(PROGRAM.splitlines(), 1)
    assert found == {number for number, line in lines if "# wrong" in line}, done.stdout
