"""The check of a GPU runs on simulated devices, where what it checks passes."""

import importlib
import json
import re
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from mirror.device.side_streams import CopyStreams
from mirror.devices import synchronize
from tests.gpu.fake import FakeGpus

ROOT = Path(__file__).parents[2]
SKIPPED = {  # of the checks of a GPU, where there is none
    "nccl, one rank",
    "nccl, one rank, late streams",
    "nccl, one rank, time-out",
    "a graph captured after a run",
    "peers",
}
# Others of their kind are shorter, or they start processes.
LONG = re.compile("[18] on one|lockstep|plain loop, way [12]|process|first use|how many blocks")


@pytest.fixture
def run(script_pool):
    def run(*options):
        return script_pool.run_file(ROOT / "benchmarks" / "gpu_check.py", *options, timeout=900)

    return run


@pytest.fixture
def load(monkeypatch):
    """Imports a module of the benchmarks, which find each other as programs do."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module


@pytest.mark.slow
def test_the_short_checks_of_a_gpu_pass_on_simulated_devices(load):
    cpu = torch.device("cpu")
    made = [
        load("supervised").made(name, check)
        for name, check in load("gpu_check").checks(cpu, 1000)
        if not LONG.search(name)
    ]
    assert len(made) > 30
    assert [outcome for outcome in made if outcome.state == "failed"] == []
    assert {outcome.name for outcome in made if outcome.state == "skipped"} == SKIPPED


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_check_of_a_gpu_runs_on_simulated_devices(run, tmp_path):
    found = tmp_path / "found.json"
    options = f"--device cpu --elements 1000 --json {found}".split()
    result = run(*options)
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads(found.read_text())
    states = {check["name"]: check["state"] for check in report["checks"]}
    assert {name for name, state in states.items() if state == "skipped"} == SKIPPED
    assert states["direct, 8 on one, late streams"] == "passed"
    assert set(states.values()) == {"passed", "skipped"}
    assert states["doctor"] == "passed"
    assert report["seconds"] < report["budget_seconds"] < 8 * 60
    assert f"s of {report['budget_seconds']} s" in result.stdout
    assert "auto and training, 4 on one device" in result.stdout
    assert "chose host" in result.stdout
    assert states["SyncBatchNorm beside buckets"] == "passed"
    assert states["one replica / a plain loop, way 3"] == "passed"


@pytest.mark.slow
def test_the_check_of_a_gpu_makes_those_that_are_named(run):
    result = run("--device", "cpu", "--only", "ring, 4 on one", "--elements", 99)
    assert result.returncode == 0, result.stdout + result.stderr
    names = [line.split("  ")[0] for line in result.stdout.splitlines()]
    assert names[:2] == ["passed", "passed"]
    assert "2 passed, 0 failed, 0 skipped; " in names[2]


@pytest.mark.parametrize("waits", [False, True])
def test_the_check_of_a_gpu_sees_whether_a_call_waits_for_earlier_work(load, monkeypatch, waits):
    gpu_check = load("gpu_check")

    def pageable(copies, tensor):
        synchronize(gpus.devices[0])
        return tensor

    with FakeGpus(2) as gpus, monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "_sleep", lambda cycles: None)
        if waits:
            patched.setattr(CopyStreams, "pinned", pageable)
        with pytest.raises(AssertionError, match="waited") if waits else nullcontext():
            assert "busy" in gpu_check.waits_for_no_copy(tuple(gpus.devices))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_check_of_a_gpu_needs_one(run):
    result = run()
    assert result.returncode == 2
    assert "there is no GPU; --device cpu" in result.stderr
