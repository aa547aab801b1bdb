"""benchmarks/gpu_waits.py, on simulated GPUs: its checks pass, and fail where they should."""

import importlib
from pathlib import Path

import pytest
import torch

from mirror.comm import self_test, subprocess_probe
from mirror.comm.nccl import clique
from mirror.comm.subprocess_probe import FOLDER_VARIABLE
from tests.comm.nccl.fake_nccl import MISSING
from tests.gpu.fake_cupy import gpus_with_cupy
from tests.gpu.fake_nccl import gpus_with_nccl
from tests.gpu.streams import FakeEvent

ROOT = Path(__file__).parents[2]
needs_compiler = pytest.mark.skipif(bool(MISSING), reason=str(MISSING))


@pytest.fixture
def waits(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("gpu_waits")


@pytest.fixture
def child(monkeypatch, tmp_path):
    """Gives ``child(said)``: what a child's last line says."""

    def says(**said):
        program = f"import json, sys; print(sys.argv[1], json.dumps({said}))"
        monkeypatch.setattr(subprocess_probe, "PROBE", ("-S", "-c", program))

    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    return says


def test_a_process_that_hangs_is_seen_to_be_killed(waits, monkeypatch):
    monkeypatch.setattr(waits, "HANG_SECONDS", 0.05)
    assert waits.is_killed((torch.device("cpu"),)).startswith("after ")
    monkeypatch.setattr(waits, "_HANGS", "raise SystemExit(-1)")
    with pytest.raises(subprocess_probe.ProbeUnavailable):
        waits.is_killed((torch.device("cpu"),))
    program = "import sys; print(sys.argv[1], '{\"result\": null}')"
    monkeypatch.setattr(waits, "_HANGS", program)
    with pytest.raises(AssertionError, match="not found out"):
        waits.is_killed((torch.device("cpu"),))


@pytest.mark.parametrize(
    ("report", "message"),
    [
        ({"result": None}, None),
        ({"result": "a bit"}, "a bit"),
        ({"unavailable": "no"}, "no process"),
    ],
)
def test_what_a_process_finds_is_what_comes_of_the_check(waits, child, report, message):
    child(**report)
    with gpus_with_cupy(2) as gpus:
        if message is None:
            assert waits.goes_first("direct", tuple(gpus.devices)).endswith(" s")
            assert "then" in waits.is_remembered(tuple(gpus.devices))
        else:
            with pytest.raises(AssertionError, match=message):
                waits.goes_first("direct", tuple(gpus.devices))


def test_a_verdict_that_is_forgotten_is_seen(waits, child, monkeypatch):
    child(result=None)
    monkeypatch.setattr(subprocess_probe, "load_verdict", lambda facts: None)
    with gpus_with_cupy(2) as gpus, pytest.raises(AssertionError, match="the first took"):
        waits.is_remembered(tuple(gpus.devices))


@needs_compiler
def test_calls_of_nccl_are_counted(waits, monkeypatch):
    monkeypatch.setattr(waits, "CALLS", 3)
    with gpus_with_nccl(2, polls=4) as gpus:
        found = waits.calls_of_nccl(tuple(gpus.devices))
    # Of one group: 4 times without effect, and each of both.
    assert [part.split(", ")[1] for part in found.split("; ")] == [
        "6.0 questions",
        "12.0 questions",
    ]


@needs_compiler
@pytest.mark.parametrize("fault", [None, "the last is early", "the others are late"])
def test_whether_the_last_gpu_stands_for_all_is_seen(waits, monkeypatch, fault):
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None, raising=False)
    monkeypatch.setattr(waits, "LATER_SECONDS", 0.05 if fault is None else 0.0)
    monkeypatch.setattr(self_test, "_results", {})
    message = {"the last is early": "before cuda:0 had begun", None: ""}
    with gpus_with_nccl(2) as gpus:
        if fault is not None:
            asked = []

            def query(event):
                asked.append(event)
                return fault == "the others are late" and len(asked) == 1

            monkeypatch.setattr(clique.Work, "is_done", lambda operation: True)
            monkeypatch.setattr(FakeEvent, "query", query)
            with pytest.raises(AssertionError, match=message.get(fault, "others are not done")):
                waits.stands_for_all(tuple(gpus.devices))
        else:
            monkeypatch.setattr(FakeEvent, "query", lambda event: True)
            assert "the others are done" in waits.stands_for_all(tuple(gpus.devices))
