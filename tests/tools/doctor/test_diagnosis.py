"""mirror/tools/doctor/diagnosis.py and ``mirror doctor``."""

import json

import pytest
import torch

from mirror import cli
from mirror.comm import self_test
from mirror.comm.selection import Choice, Facts
from mirror.tools.doctor import diagnosis
from mirror.tools.doctor.diagnosis import BackendReport, Diagnosis, diagnose

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def lines_of(text, label):
    """Returns what stands beside a label."""
    lines = text.splitlines()
    (begin,) = [i for i, line in enumerate(lines) if line.startswith(label)]
    end = begin + 1
    while end < len(lines) and lines[end].startswith(" "):
        end += 1
    return [line[12:] for line in lines[begin:end]]


@no_gpu
def test_without_a_gpu_it_examines_simulated_devices_and_says_how_to_simulate(capsys):
    assert cli.main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert lines_of(text, "devices")[1:] == [f"replica {i}: cpu, simulated" for i in range(4)]
    assert lines_of(text, "topology") == ["islands of near replicas: 0 1 | 2 3"]
    assert 'mirror.MirroredStrategy(["cpu"] * 4)' in "".join(lines_of(text, "simulate"))
    backends = lines_of(text, "backends")
    for name in ("direct", "hierarchical", "host", "naive", "ring"):
        assert f"{name:14}can serve; its self-test passed" in backends
    assert "nccl          cannot serve: NCCL serves GPUs only" in backends
    assert lines_of(text, "auto") == ["host: it reduces the CPU's memory in place"]


def test_devices_can_be_named_and_the_answer_be_json(capsys):
    assert cli.main(["doctor", "--json", "--devices", "cpu,cpu"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["devices"] == [{"device": "cpu", "name": "cpu"}] * 2
    assert found["simulated"] is True
    assert found["peers"] == [[True, True], [True, True]]
    assert found["islands"] == [[0, 1]]
    backends = {backend["name"]: backend for backend in found["backends"]}
    assert backends["host"] == {
        "name": "host",
        "reason": None,
        "failure": None,
        "can_serve": True,
    }
    assert backends["nccl"]["can_serve"] is False
    assert found["auto"]["name"] == "host"
    assert found["healthy"] is True
    assert found["torch"] == torch.__version__


def test_a_device_that_does_not_exist_is_one_line(capsys):
    assert cli.main(["doctor", "--devices", "cuda:99"]) == 1
    assert capsys.readouterr().err.startswith("mirror: 'cuda:99' does not exist")


def test_a_self_test_that_fails_is_shown_and_exit_code_1(monkeypatch, capsys):
    def failure(kind, devices):
        return "replica 1 got 3 instead of 4" if kind.name == "ring" else None

    monkeypatch.setattr(self_test, "failure", failure)
    assert cli.main(["doctor", "--devices", "cpu,cpu"]) == 1
    backends = lines_of(capsys.readouterr().out, "backends")
    assert "ring          FAILED: replica 1 got 3 instead of 4" in backends
    assert diagnose(["cpu"] * 2).healthy is False


def test_a_trial_that_may_compile_is_told_before_it_begins(monkeypatch, capsys):
    log = []

    def failure(kind, devices):
        log.append((kind.name, capsys.readouterr().err.split(":")[0]))

    monkeypatch.setattr(self_test, "failure", failure)
    monkeypatch.setattr(diagnosis, "is_simulated", lambda devices: False)
    assert cli.main(["doctor", "--devices", "cpu,cpu", "--json"]) == 0
    told = {name: line for name, line in log if line}
    assert told == {name: name for name in ("direct", "hierarchical", "ring")}  # each on a line
    monkeypatch.undo()
    diagnose(["cpu"] * 2, tell=log.clear)  # nothing takes long on simulated devices
    assert log


class Library:
    path = "/lib/libnccl.so.2"
    version = 22809


def four_gpus():
    """Two bridged pairs of GPUs; 0 and 1 reach nobody else, the third replica shares GPU 1."""
    t, f = True, False
    return Diagnosis(
        num_gpus=3,
        facts=Facts(
            tuple(torch.device("cuda", i) for i in (0, 1, 1, 2)),
            peers=((t, t, t, f), (t, t, t, t), (t, t, t, t), (f, t, t, t)),
            links=((t, t, t, f), (t, t, t, f), (t, t, t, f), (f, f, f, t)),
            islands=((0, 1), (2, 3)),
        ),
        names=("H100",) * 4,
        nccl=Library(),
        nccl_reason=None,
        backends=(
            BackendReport("direct", None, "replica 1 got 3 " * 20),
            BackendReport("ring", None, None),
        ),
        auto=Choice("ring", "neighbours reach each other"),
    )


def test_the_peer_matrix_tells_links_from_pcie():
    text = four_gpus().to_text()
    assert lines_of(text, "devices") == [
        "replica 0: cuda:0, H100",
        "replica 1: cuda:1, H100",
        "replica 2: cuda:1, H100",
        "replica 3: cuda:2, H100",
    ]
    assert lines_of(text, "topology")[2:] == [
        "     0  1  2  3",
        "  0  =  N  N  -",
        "  1  N  =  =  P",
        "  2  N  =  =  P",
        "  3  -  P  P  =",
    ]
    assert lines_of(text, "libnccl") == ["2.28.9, /lib/libnccl.so.2"]
    assert "simulate" not in text


def test_long_lines_are_wrapped_for_the_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = four_gpus().to_text()
    assert max(map(len, text.splitlines())) <= 80
    assert lines_of(text, "backends")[0].startswith("direct        FAILED: replica 1 got 3")
    assert len(lines_of(text, "backends")) > 5


def test_json_holds_the_version_of_nccl():
    found = json.loads(four_gpus().to_json())
    assert found["libnccl"] == {"path": "/lib/libnccl.so.2", "version": "2.28.9", "reason": None}
    assert found["healthy"] is False
    assert [backend["can_serve"] for backend in found["backends"]] == [False, True]


def test_a_missing_libnccl_has_its_reason(monkeypatch):
    monkeypatch.setattr(diagnosis.libnccl, "missing_reason", lambda: "there is no libnccl")
    found = diagnose(["cpu"])
    assert lines_of(found.to_text(), "libnccl") == ["cannot be used: there is no libnccl"]
    assert json.loads(found.to_json())["libnccl"]["version"] is None


def test_an_installation_without_metadata_has_no_version(monkeypatch):
    def missing(name):
        raise diagnosis.PackageNotFoundError

    monkeypatch.setattr(diagnosis, "version", missing)
    assert four_gpus().to_text().splitlines()[0].startswith("versions    mirror unknown, torch ")
