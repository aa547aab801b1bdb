"""benchmarks/gpu_modules.py on simulated devices and GPUs: what is right passes, faults fail."""

import importlib
import json
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mirror.compiler.runtime import module_graphs
from mirror.device.cuda_graph import CudaGraph
from tests.gpu.compiling import compiling_gpus
from tests.gpu.graphs import graphs_on

ROOT = Path(__file__).parents[2]
ONE = (torch.device("cuda", 0),)


@pytest.fixture
def checks(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("gpu_modules")


@contextmanager
def simulated_gpu(monkeypatch):
    with compiling_gpus(1) as gpus, graphs_on(gpus) as graphs:
        reserved = lambda device=None: graphs.reserved  # noqa: E731
        monkeypatch.setattr(torch.cuda, "memory_reserved", reserved, raising=False)
        yield graphs


def programs(checks, *names):
    return [program for program in checks.PROGRAMS if program.name in names]


def test_a_simulated_gpu_passes(checks, monkeypatch):
    (dropout, sizes) = programs(checks, "dropout", "three sizes")
    with simulated_gpu(monkeypatch):
        assert "5 tensors" not in checks.has_the_bits(dropout, ONE * 2)
        assert checks.has_the_bits(replace(sizes, sizes=(8, 6)), ONE).endswith(" captures")
        assert checks.runs_on_streams(ONE) == "20 calls on 3 streams"


def test_other_numbers_are_found(checks, monkeypatch):
    (dropout,) = programs(checks, "dropout")
    launch = CudaGraph.launch

    def late(graph, *tensors):
        torch.rand(1, device="cuda:0")
        launch(graph, *tensors)

    monkeypatch.setattr(CudaGraph, "launch", late)
    with simulated_gpu(monkeypatch), pytest.raises(AssertionError, match="tensors differ"):
        checks.has_the_bits(dropout, ONE)


def test_calls_without_graphs_are_found(checks, monkeypatch):
    (dropout,) = programs(checks, "dropout")
    monkeypatch.setattr(module_graphs.ModuleGraphs, "run_forward", lambda *_: False)
    with simulated_gpu(monkeypatch), pytest.raises(AssertionError, match="captures where"):
        checks.has_the_bits(dropout, ONE)


@pytest.mark.parametrize("shares", [True, False])
def test_memory_of_each_size_is_found(checks, monkeypatch, shares):
    monkeypatch.setattr(checks, "LARGE", (128, 120, 112))
    monkeypatch.setattr(checks, "NUM_STEPS", 3)
    monkeypatch.setattr(checks, "DEPTH", 4)
    monkeypatch.setattr(checks, "MOST_BYTES", 2)  # so few layers save less
    if not shares:  # what forward saves stays in tensors
        monkeypatch.setattr(module_graphs.ModuleGraphs, "_let_go", lambda self: None)
    with simulated_gpu(monkeypatch):
        if shares:
            assert "MiB with one size" in checks.shares_memory(ONE)
            return
        with pytest.raises(AssertionError, match="MiB with one size"):
            checks.shares_memory(ONE)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_program_passes_on_simulated_devices(script_pool, tmp_path):
    found = tmp_path / "found.json"
    program = ROOT / "benchmarks" / "gpu_modules.py"
    options = ["--budget", "600", "--json", found, "cpu", "cpu"]
    result = script_pool.run_file(program, *options, timeout=900)
    assert result.returncode == 0, result.stdout + result.stderr
    states = {check["name"]: check["state"] for check in json.loads(found.read_text())["checks"]}
    assert states["module, attention with dropout"] == "passed"
    assert list(states.values()).count("skipped") == 2
