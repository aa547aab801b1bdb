"""benchmarks/: the programs run and say what they promise; their numbers are not judged here."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]


def run(program, *options):
    return subprocess.run(
        [sys.executable, f"benchmarks/{program}", *options],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )


def test_all_reduce_compares_the_backends_with_gloo_and_a_copy(tmp_path):
    # 4 KiB, for which no target is set: a busy machine must not fail this.
    found = tmp_path / "found.json"
    options = "--replicas 2 --sizes 4096 --rounds 2 --gloo 2 --backends host naive --json".split()
    result = run("all_reduce.py", *options, str(found))
    assert result.returncode == 0, result.stderr
    rows = {row["name"]: row for row in json.loads(found.read_text())["rows"]}
    assert list(rows) == ["torch", "host", "naive", "gloo", "copy", "copy-nt"]
    for name, row in rows.items():
        assert f"| {name:12} |      4096 |" in result.stdout
        assert row["us"][0] > 0
        if not name.startswith("copy"):
            assert row["busbw"] == row["algbw"]  # 2(n-1)/n is 1 for n = 2
            assert row["max_error"] < 1e-4


def test_the_check_of_a_gpu_runs_on_simulated_devices(tmp_path):
    found = tmp_path / "found.json"
    options = f"--device cpu --elements 1000 --json {found}".split()
    result = run("gpu_check.py", *options)
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads(found.read_text())
    states = {check["name"]: check["state"] for check in report["checks"]}
    assert {name for name, state in states.items() if state == "skipped"} == {
        "nccl, one rank",
        "nccl, one rank, late streams",
        "nccl, one rank, time-out",
    }
    assert states["direct, 8 on one, late streams"] == "passed"
    assert set(states.values()) == {"passed", "skipped"}
    assert report["doctor"]["healthy"] is True
    assert "auto and training, 4 on one device" in result.stdout
    assert "chose host" in result.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_check_of_a_gpu_needs_one():
    result = run("gpu_check.py")
    assert result.returncode == 2
    assert "there is no GPU; --device cpu" in result.stderr
