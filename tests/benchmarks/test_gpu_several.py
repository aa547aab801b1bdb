"""benchmarks/gpu_several.py, on simulated devices and GPUs: its checks pass, and can fail."""

import importlib
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from tests.gpu.fake import FakeGpus
from tests.gpu.fake_nccl import gpus_with_nccl

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
CPUS = (torch.device("cpu"),) * 2
SHARED = (torch.device("cuda:0"),) * 2
APART = torch.device("cuda:0"), torch.device("cuda:1")
# One reads a CUDA error, the other compiles.
NEEDS_CUDA = {"a device that fails", "attention compiled"}

pytestmark = [
    # Of replicas on GPUs that share a generator or a flag.
    pytest.mark.filterwarnings("ignore:.*replicas.*turn"),
    pytest.mark.filterwarnings("ignore:PyTorch was compiled without cuDNN"),
]


@pytest.fixture
def load(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module


@pytest.fixture
def several(load, monkeypatch):
    module = load("gpu_several")
    monkeypatch.setattr(module, "ROUNDS", 1)
    return module


def outcomes_of(load, several, devices, leaves_out=()):
    gpus = {CPUS: nullcontext, SHARED: FakeGpus, APART: gpus_with_nccl}[devices]
    with gpus(2):
        made = [
            load("supervised").run_check(name, check)
            for name, check in several.several_checks(devices, "")
            if name not in leaves_out
        ]
    return {outcome.name: (outcome.state, outcome.detail) for outcome in made}


def test_every_check_passes_on_simulated_devices(load, several):
    outcomes = outcomes_of(load, several, CPUS)
    assert next(iter(outcomes)) == "synchronized norms outside run"
    skipped = outcomes.pop("a device that fails")
    assert skipped == ("skipped", "simulated devices do not fail")
    assert [made for made in outcomes.items() if made[1][0] != "passed"] == []
    assert len(outcomes) == 13


def test_every_check_passes_on_simulated_gpus(load, several):
    # NCCL's own thread enqueues on the stream to which the other strategy's thread adds work.
    outcomes = outcomes_of(load, several, APART, {*NEEDS_CUDA, "two strategies at once"})
    assert [made for made in outcomes.items() if made[1][0] != "passed"] == []
    assert len(outcomes) == 11


@pytest.mark.slow
def test_every_check_passes_on_replicas_that_share_a_simulated_gpu(load, several):
    outcomes = outcomes_of(load, several, SHARED, NEEDS_CUDA)
    assert [made for made in outcomes.items() if made[1][0] != "passed"] == []
    assert len(outcomes) == 12


def test_replicas_that_share_a_stream_are_found(several, monkeypatch):
    draw, shared = torch.rand, torch.Generator().manual_seed(0)
    monkeypatch.setattr(torch, "rand", lambda *size, device=None: draw(*size, generator=shared))
    with pytest.raises(AssertionError, match=r"replica 1 drew .* as replica 0 drew more"):
        several.streams_are_own(CPUS)


def test_parameters_that_differ_from_those_of_one_device_are_found(several, monkeypatch):
    trainings = importlib.import_module("gpu_trainings")
    monkeypatch.setattr(trainings, "parts", lambda tensor, devices: tensor[:4])
    with pytest.raises(AssertionError, match="buckets, way 3, parameter 0"):
        several.buckets_of_several_threads(CPUS)


@pytest.mark.slow
def test_the_program_runs_the_checks_that_are_named(script_pool):
    program = BENCHMARKS / "gpu_several.py"
    result = script_pool.run_file(program, "--only", "conversions", "cpu", "cpu", timeout=900)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "passed  conversions in a scope" in result.stdout
    assert "1 passed, 0 failed, 0 skipped; " in result.stdout
