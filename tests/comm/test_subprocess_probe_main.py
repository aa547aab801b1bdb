"""The real process, on simulated devices; and what it says when it fails."""

import io
import json
import sys

import pytest
import torch

from mirror.comm import subprocess_probe_main
from mirror.comm.host.naive_backend import NaiveCommunicator
from mirror.comm.kernels.direct_backend import DirectCommunicator
from mirror.comm.subprocess_probe import run_probe


def test_a_process_tries_a_backend_and_finds_nothing(monkeypatch, tmp_path):
    (tmp_path / "torch.py").write_text("raise SystemExit('the wrong torch')")
    if sys.version_info >= (3, 11):  # before, Python looks there first
        monkeypatch.chdir(tmp_path)
    assert run_probe(DirectCommunicator, ["cpu"] * 2) is None


@pytest.fixture
def said(monkeypatch, capsys):
    """Gives ``said(kind)``: what the program says of a class of this file, in this process."""
    monkeypatch.setattr(
        subprocess_probe_main.faulthandler, "dump_traceback_later", lambda *_, **__: None
    )

    def run(kind, *devices):
        monkeypatch.setattr(subprocess_probe_main, "_named", lambda name: kind)
        subprocess_probe_main.main(["TOKEN", "any:class", *(devices or ("cpu", "cpu"))])
        lines = capsys.readouterr().out.split("\n")
        return [json.loads(line.removeprefix("TOKEN ")) for line in lines if line]

    return run


class Right(NaiveCommunicator):
    def __init__(self, devices, *, timeout_seconds):
        assert timeout_seconds <= 60
        super().__init__(devices)


class Wrong(Right):
    def broadcast(self, tensors, root=0):
        pass


class Broken(Right):
    def __init__(self, devices, *, timeout_seconds):
        raise OSError("no peers")


class Large(Right):
    def prepare(self, reductions):
        raise torch.OutOfMemoryError("CUDA out of memory")


STATES = [{"state": state} for state in ("started", "made", "prepared")]


def test_it_says_how_far_it_is_and_what_it_found(said):
    assert said(Right) == [*STATES, {"found": None}]
    *states, found = said(Wrong)
    assert states == STATES
    assert found["found"].startswith("BackendError: replica 0 (cpu) got 2.0 instead of 1.0")
    assert said(Broken) == [STATES[0], {"found": "OSError: no peers"}]


def test_memory_that_others_have_and_devices_that_are_not_there_are_no_verdict(said):
    assert said(Large) == [*STATES[:2], {"untried": "CUDA out of memory"}]
    ((word, text),) = said(Right, "cuda:99")[0].items()
    assert (word, text[:33]) == ("untried", "DeviceError: 'cuda:99' does not e")


def test_a_class_is_found_by_its_name():
    assert (
        subprocess_probe_main._named("mirror.comm.kernels.direct_backend:DirectCommunicator")
        is DirectCommunicator
    )


def test_what_it_says_is_out_before_it_goes_on(said, monkeypatch):
    told = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(told, write_through=False))
    lines = []

    class Looking(Right):
        def __init__(self, devices, *, timeout_seconds):
            lines.append(told.getvalue())  # what is read of it, should it end here
            super().__init__(devices, timeout_seconds=timeout_seconds)

    said(Looking)
    assert lines == [b'\nTOKEN {"state": "started"}\n']
