"""What is said where something for GPUs is missing: sentences, in the doctor and in gpu_check."""

import importlib
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import mirror
from mirror import comm
from mirror.comm import registry, self_test, subprocess_probe
from mirror.comm.kernels import cuda_kernels, launcher
from mirror.comm.nccl import libnccl
from mirror.errors import BackendError
from mirror.tools.doctor.diagnosis import diagnose
from tests.gpu.fake import FakeGpus

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
KERNELS = ("direct", "hierarchical", "ring")
ALL = ("nccl", *KERNELS)


def no_cupy(patched):
    patched.setattr(cuda_kernels, "find_spec", lambda name: None)


def no_sources(patched):
    patched.setattr(cuda_kernels, "source_folder", lambda: None)


def no_driver(patched):
    # Past its cache, which keeps what this machine has.
    patched.setattr(launcher, "missing_reason", launcher.missing_reason.__wrapped__)
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


# What is missing, on GPUs that reach each other, whose backends say what.
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
            patched.setattr(launcher, "missing_reason", lambda: None)
        patched.setattr(self_test, "_found", {})
        patched.setattr(self_test, "failure", lambda kind, devices: None)
        patched.setattr(subprocess_probe, "unsafe_reason", lambda kind, devices, anew: None)
        lacks(patched)
        yield tuple(gpus.devices)


@pytest.mark.parametrize(("lacks", "peers", "names", "sentence"), CASES)
def test_a_machine_that_lacks_something_is_told_so_in_a_sentence(
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
