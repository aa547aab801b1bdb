"""The checks of compiled steps on a GPU, on simulated devices: that they check, and pass."""

import importlib
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.slow
CPU = torch.device("cpu")


@pytest.fixture
def gpu_graphs(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    module = importlib.import_module("gpu_graphs")
    monkeypatch.setattr(module, "_ROUNDS", 2)
    monkeypatch.setattr(module, "_STEPS", 1)
    return module


def test_every_check_passes_on_simulated_devices(gpu_graphs):
    checks = dict(gpu_graphs.graph_checks(CPU, (CPU,)))
    assert len(checks) == 7
    for name in ("draws", "1 on one, speed"):
        assert checks[f"compiled step, {name}"]()


def test_a_step_that_is_wrong_is_found(gpu_graphs, monkeypatch):
    train = gpu_graphs._Training.train

    def wrong(training, steps):
        train(training, steps + (training.mode is not None))

    monkeypatch.setattr(gpu_graphs._Training, "train", wrong)
    with pytest.raises(AssertionError, match="not close"):
        gpu_graphs.is_captured((CPU,) * 2)
