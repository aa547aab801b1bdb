"""mirror doctor: its findings, and the sentences about missing parts of a GPU setup."""

import importlib
import json
import subprocess
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import mirror
from mirror import cli, comm
from mirror.comm import registry, self_test, subprocess_probe
from mirror.comm.kernels import cuda_kernels, launcher
from mirror.comm.nccl import libnccl
from mirror.comm.registry import Choice, Facts
from mirror.errors import BackendError
from mirror.tools import diagnosis
from mirror.tools.diagnosis import BackendReport, Diagnosis, diagnose, examine_gil
from tests.gpu.fake import FakeGpus

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


def test_a_trial_that_may_compile_is_announced(monkeypatch, capsys):
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
    """Two bridged pairs of GPUs; 0 and 1 reach no other GPU, the third replica shares GPU 1."""
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


def test_the_peer_matrix_separates_links_from_pcie():
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
    monkeypatch.setattr(diagnosis.libnccl, "nccl_missing_reason", lambda: "there is no libnccl")
    found = diagnose(["cpu"])
    assert lines_of(found.to_text(), "libnccl") == ["cannot be used: there is no libnccl"]
    assert json.loads(found.to_json())["libnccl"]["version"] is None


@pytest.mark.parametrize("is_installed", [True, False])
def test_a_package_without_metadata_is_used_from_a_checkout(monkeypatch, is_installed):
    def find(name):
        if not is_installed:
            raise diagnosis.PackageNotFoundError
        return "metadata of another version"

    monkeypatch.setattr(diagnosis, "version", find)
    source = "" if is_installed else " from a checkout"
    first, *_ = four_gpus().to_text().splitlines()
    assert first.startswith(f"versions    mirror {mirror.__version__}{source}, torch ")
    found = json.loads(four_gpus().to_json())
    assert found["mirror"] == mirror.__version__
    assert found["installed"] is is_installed


BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
KERNELS = ("direct", "hierarchical", "ring")
ALL = ("nccl", *KERNELS)


def no_cupy(patched):
    patched.setattr(cuda_kernels, "find_spec", lambda name: None)


def no_sources(patched):
    patched.setattr(cuda_kernels, "source_folder", lambda: None)


def no_driver(patched):
    # Past its cache, which keeps what this machine has.
    patched.setattr(
        launcher, "launcher_missing_reason", launcher.launcher_missing_reason.__wrapped__
    )
    patched.setattr(launcher, "DRIVER", "libcuda-that-is-not-there.so.1")


def blocking_launches(patched):
    patched.setenv("CUDA_LAUNCH_BLOCKING", "1")


def no_nccl(patched):
    patched.setattr(libnccl, "mapped_files", lambda: ())
    patched.setattr(libnccl, "packaged_file", lambda: None)


def old_nccl(patched):
    patched.setattr(libnccl, "mapped_files", lambda: ("/lib/libnccl.so.2",))
    patched.setattr(libnccl, "_load", lambda path: SimpleNamespace(version=21403))


def two_nccls(patched):
    patched.setattr(libnccl, "mapped_files", lambda: ("/lib/libnccl.so.2", "/opt/libnccl.so.2"))


def broken_nccl(patched):
    def load(path):
        raise OSError(f"{path}: undefined symbol: ncclCommInitAll")

    patched.setattr(libnccl, "mapped_files", lambda: ("/lib/libnccl.so.2",))
    patched.setattr(libnccl, "_load", load)


def nothing(patched):
    """Peers are the fake's."""


# What is missing, on GPUs that reach each other, and which backends report it.
CASES = [
    (no_cupy, True, KERNELS, "it needs CuPy on GPUs; install mirror-strategy[cu12] or [cu13]"),
    (no_sources, True, KERNELS, "the sources of its kernels (csrc/) are not installed; reinstall"),
    (no_driver, True, KERNELS, "the CUDA driver's library libcuda-that-is-not-there.so.1 does no"),
    (blocking_launches, True, ALL, "unset it"),
    (nothing, False, KERNELS, "cannot access the memory of cuda:"),
    (no_nccl, True, ("nccl",), "there is no libnccl: torch has not loaded one and none is insta"),
    (old_nccl, True, ("nccl",), "libnccl 2.14.3 is not one of the versions that mirror knows"),
    (two_nccls, True, ("nccl",), "two copies of libnccl are loaded, /lib/libnccl.so.2 and /opt/"),
    (broken_nccl, True, ("nccl",), "/lib/libnccl.so.2 does not load (/lib/libnccl.so.2: undefin"),
]


@contextmanager
def machine(monkeypatch, lacks, peers):
    """Two GPUs with everything but what is missing; no trial is made on them."""
    with FakeGpus(2, peers=peers) as gpus, monkeypatch.context() as patched:
        patched.setattr(cuda_kernels, "find_spec", lambda name: True)
        if lacks is not no_driver:
            patched.setattr(launcher, "launcher_missing_reason", lambda: None)
        patched.setattr(self_test, "_results", {})
        patched.setattr(self_test, "failure", lambda kind, devices: None)
        patched.setattr(subprocess_probe, "unsafe_reason", lambda kind, devices, retry: None)
        lacks(patched)
        yield tuple(gpus.devices)


@pytest.mark.parametrize(("lacks", "peers", "names", "sentence"), CASES)
def test_a_missing_part_of_the_machine_is_reported_in_a_sentence(
    monkeypatch, lacks, peers, names, sentence
):
    monkeypatch.syspath_prepend(BENCHMARKS)
    checking = importlib.import_module("checking")
    with machine(monkeypatch, lacks, peers) as devices:
        found = diagnose(devices)
        text = " ".join(found.to_text().split())
        reports = {backend.name: backend.reason for backend in found.backends}
        for name in names:
            assert sentence in reports[name]
            assert "\n" not in reports[name]
            assert f"{name} cannot serve: " in text
            with pytest.raises(BackendError) as refused:
                comm.create(name, devices)
            assert sentence in str(refused.value)
            with pytest.raises(checking.Skipped) as skipped:
                checking.created(name, devices)
            assert sentence in str(skipped.value)
            assert name != found.auto.name
            assert name not in comm.available(devices)
        assert reports["naive"] is None
        assert "Traceback" not in text


def test_where_nothing_for_gpus_is_there_training_works_and_the_log_says_why(monkeypatch, caplog):
    def everything(patched):
        no_cupy(patched)
        no_nccl(patched)

    with (
        machine(monkeypatch, everything, False) as devices,
        mirror.MirroredStrategy(devices) as strategy,
    ):
        model = strategy.mirror(torch.nn.Linear(3, 2))
        model(torch.ones(4, 3)).sum().backward()
        assert strategy.backend == "naive"
    (told,) = [r.getMessage() for r in caplog.records if "backend 'naive'" in r.getMessage()]
    assert "not nccl: there is no libnccl" in told
    assert "not ring: it needs CuPy on GPUs" in told


def test_every_reason_of_the_code_has_a_case():
    told = {name for _, _, names, _ in CASES for name in names}
    waiting = {name for name in registry.names() if registry.check_name(name).needs_trial}
    assert told == waiting


# Whether the GIL is on, and which import turns it on


WARNING = (
    "<frozen>:1: RuntimeWarning: The global interpreter lock (GIL) has been enabled to load "
    "module 'triton._C.libtriton', which has not declared that it can run safely without the GIL."
)


@pytest.fixture
def free_threaded(monkeypatch):
    """Gives ``free_threaded(on=..., stderr=...)``: as where a fresh process writes that."""

    def make(*, on, stderr=""):
        done = subprocess.CompletedProcess([], 0, "", stderr)
        monkeypatch.delenv("PYTHON_GIL", raising=False)
        monkeypatch.setattr(diagnosis.sysconfig, "get_config_var", lambda name: 1)
        monkeypatch.setattr(diagnosis.subprocess, "run", lambda *_, **__: done)
        monkeypatch.setattr(diagnosis, "is_gil_enabled", lambda: on)

    return make


def test_an_ordinary_interpreter_has_one(monkeypatch):
    monkeypatch.setattr(diagnosis.sysconfig, "get_config_var", lambda name: 0)
    assert examine_gil().render().startswith("on, as in every ordinary Python")


@pytest.mark.parametrize(("on", "now"), [(True, "on; "), (False, "off now; ")])
def test_the_import_that_turns_it_on_is_named_with_the_remedy(free_threaded, on, now):
    free_threaded(on=on, stderr=WARNING)
    line = examine_gil().render()
    assert line.startswith(f"{now}importing triton._C.libtriton")
    assert "PYTHON_GIL=0" in line


def test_nothing_turns_it_on(free_threaded):
    free_threaded(on=False)
    assert examine_gil().render() == "off; replicas run at once"


def test_what_keeps_it_off_needs_no_process(free_threaded, monkeypatch):
    free_threaded(on=False, stderr=WARNING)
    monkeypatch.setenv("PYTHON_GIL", "0")
    assert examine_gil().turned_on_by is None
