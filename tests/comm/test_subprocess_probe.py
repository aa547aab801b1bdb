"""Probes in a subprocess: their outcome, the real process, and the cache on disk."""

import errno
import io
import json
import logging
import os
import subprocess
import sys
from unittest import mock

import pytest
import torch

import mirror
from mirror import comm
from mirror.comm import registry, self_test, subprocess_probe, subprocess_probe_main
from mirror.comm.host_backends import NaiveCommunicator
from mirror.comm.kernels.kernel_backends import DirectCommunicator
from mirror.comm.subprocess_probe import (
    FOLDER_VARIABLE,
    ProbeUnavailable,
    Verdict,
    load_verdict,
    run_probe,
    store,
    unsafe_reason,
)
from mirror.errors import BackendError
from mirror.tools.diagnosis import diagnose
from tests.gpu.fake_cupy import gpus_with_cupy

TWO = tuple(torch.device("cuda", i) for i in range(2))
# What stands in for the child begins with this, and ends when its lines do.
SAY = "import json, os, sys, time; say = lambda **w: print(sys.argv[1], json.dumps(w), flush=True)"
RIGHT = "print('NCCL INFO'); say(state='started'); say(result=None); time.sleep(99)"
NO = "say(state='started'); say(result='replica 1 got 3 instead of 4')"
HANGS = "say(state='started'); say(state='made'); say(state='prepared'); time.sleep(99)"
DIES = "say(state='started'); os.kill(os.getpid(), 11)"
RUBBISH = "say(state='started'); print('\\x00}{ ' + sys.argv[1] + ' {', sys.argv[1]); print(1/0)"
NEVER_BEGINS = "sys.stderr.write('first\\nno module named torch\\n'); sys.exit(3)"


@pytest.fixture
def child(monkeypatch, tmp_path):
    """Gives ``child(program)``: from now on that is what runs; returns the list of processes."""
    started = []
    real = subprocess.Popen

    def start(*args, **kwargs):
        started.append(real(*args, **kwargs))
        return started[-1]

    def runs(program):
        monkeypatch.setattr(subprocess_probe, "PROBE", ("-S", "-c", f"{SAY}; {program}"))
        return started

    monkeypatch.setattr(subprocess_probe.subprocess, "Popen", start)
    monkeypatch.setattr(
        subprocess_probe, "_SECONDS", {**subprocess_probe._SECONDS, "prepared": 0.1}
    )
    monkeypatch.setattr(subprocess_probe, "_results", {})
    monkeypatch.setattr(subprocess_probe, "_facts", lambda kind, devices: {"kind": str(kind)})
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    yield runs
    for process in started:
        assert process.returncode is not None
        with pytest.raises(ProcessLookupError):
            os.kill(process.pid, 0)


FAILURES = {
    "says no": (NO, "replica 1 got 3 instead of 4"),
    "hangs": (HANGS, "a process that tried it hung, and was killed: after it was prepared, "
              "nothing came for 0.1 s"),
    "dies of a signal": (DIES, "a process that tried it died of SIGSEGV"),
    "prints rubbish": (RUBBISH, "a process that tried it ended with code 1 and without a verdict: "
                       "ZeroDivisionError: division by zero"),
}  # fmt: skip


def test_one_that_finds_nothing_lets_this_process_go_on(child):
    assert child(RIGHT) == []
    assert run_probe(DirectCommunicator, TWO) is None


@pytest.mark.parametrize(("program", "reason"), FAILURES.values(), ids=list(FAILURES))
def test_one_that_fails_in_any_way_is_a_reason(child, program, reason):
    child(program)
    assert run_probe(DirectCommunicator, TWO) == reason


def test_one_that_hangs_before_it_begins_is_a_reason(child, monkeypatch):
    child("time.sleep(99)")
    monkeypatch.setitem(subprocess_probe._SECONDS, "being started", 0.1)
    assert "hung, and was killed: after it was being started" in run_probe(DirectCommunicator, TWO)


@pytest.mark.parametrize(
    ("program", "why"),
    [
        (NEVER_BEGINS, "the process ended with code 3 and without a verdict: no module named"),
        ("print('rubbish')", "the process ended with code 0 and without a verdict"),
        ("say(unavailable='all devices are busy')", "all devices are busy"),
    ],
)
def test_one_that_does_not_begin_has_tried_nothing(child, program, why):
    child(program)
    with pytest.raises(ProbeUnavailable, match=why):
        run_probe(DirectCommunicator, TWO)


def frozen(monkeypatch):
    monkeypatch.setattr(sys, "frozen", True, raising=False)


def nameless(monkeypatch):
    monkeypatch.setattr(sys, "executable", "")


def forbidden(monkeypatch):
    monkeypatch.setattr(sys, "executable", __file__)  # not executable


@pytest.mark.parametrize(
    ("place", "why"),
    [
        (frozen, "not a Python that can be started"),
        (nameless, "not a Python that can be started"),
        (forbidden, "does not start: .*Permission denied"),
    ],
)
def test_where_no_process_can_be_started_a_warning_says_so_once(
    child, monkeypatch, caplog, place, why
):
    child(RIGHT)
    place(monkeypatch)
    for _ in range(2):
        assert unsafe_reason(DirectCommunicator, TWO) is None
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    with pytest.raises(ProbeUnavailable, match=why):
        run_probe(DirectCommunicator, TWO)


def test_a_class_that_others_cannot_import_is_not_tried_by_them(child):
    class Own(DirectCommunicator):
        pass

    with pytest.raises(ProbeUnavailable, match=r"no other process can import .*Own of tests"):
        run_probe(Own, TWO)


def test_ctrl_c_ends_the_process(child, monkeypatch):
    started = child(HANGS)

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess_probe, "_lines", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_probe(DirectCommunicator, TWO)
    assert len(started) == 1


@pytest.mark.parametrize(
    ("program", "expected"), [(RIGHT, None), (NO, "replica 1 got 3 instead of 4")]
)
def test_only_the_first_strategy_of_a_machine_pays(child, monkeypatch, program, expected):
    started = child(program)

    def in_another_process(**options):
        monkeypatch.setattr(subprocess_probe, "_results", {})
        return unsafe_reason(DirectCommunicator, TWO, **options)

    for _ in range(2):
        assert unsafe_reason(DirectCommunicator, TWO) == expected
    assert len(started) == 1
    later = in_another_process()
    assert later is None if expected is None else later.startswith(f"{expected} (found less than")
    assert len(started) == 1
    assert in_another_process(retry=True) == expected
    assert len(started) == 2
    monkeypatch.setenv(FOLDER_VARIABLE, "")
    assert in_another_process() == expected
    assert len(started) == 3


def test_nothing_of_it_happens_for_one_device_the_cpu_and_backends_without_risk(monkeypatch):
    for name in ("run_probe", "load_verdict", "_facts"):
        monkeypatch.setattr(subprocess_probe, name, lambda *_: pytest.fail("it costs something"))
    cpu = torch.device("cpu")
    for devices in ([cpu], [cpu] * 4, TWO[:1], TWO[:1] * 8):
        for name in comm.registry.names():
            assert unsafe_reason(comm.registry.check_name(name), devices) is None
    assert unsafe_reason(NaiveCommunicator, TWO) is None
    assert (
        unsafe_reason(registry.check_name("nccl"), TWO) is None
    )  # it has an end to every wait of its own
    with mirror.MirroredStrategy(["cpu"] * 2, "direct") as strategy:
        strategy.run(lambda: None)


@pytest.fixture
def machine(child, monkeypatch):
    """Two simulated GPUs with CuPy, on which kernels are tried by what stands in for a child."""
    monkeypatch.setattr(self_test, "_results", {})
    with gpus_with_cupy(2) as gpus, mock.patch.object(self_test, "unsafe_reason", unsafe_reason):
        yield gpus


@pytest.mark.parametrize(("program", "reason"), FAILURES.values(), ids=list(FAILURES))
def test_auto_does_without_what_failed_and_says_why(machine, child, caplog, program, reason):
    started = child(program)
    names = ["cuda:0", "cuda:1"]
    with (
        caplog.at_level(logging.INFO, "mirror"),
        mirror.MirroredStrategy(names) as strategy,
    ):
        assert strategy.backend == "naive"
    assert f"not direct: its self-test on these devices failed: {reason}" in caplog.text
    assert "Traceback" not in caplog.text
    assert len(started) == 2  # direct and ring
    assert machine.cupy.launches == []  # nothing of it in this process
    with pytest.raises(BackendError, match="'direct' cannot serve cuda:0, cuda:1: its self-test"):
        comm.create("direct", names)
    assert "direct" not in comm.available(names)
    assert len(started) == 3  # hierarchical


def test_what_passed_elsewhere_is_tried_here_and_used(machine, child):
    started = child(RIGHT)
    names = ["cuda:0", "cuda:1"]
    for _ in range(2):
        with mirror.MirroredStrategy(names) as strategy:
            assert strategy.backend == "direct"
    assert len(started) == 1
    assert started[0].args[-4:][1:] == [
        "mirror.comm.kernels.kernel_backends:DirectCommunicator",
        *names,
    ]
    assert machine.cupy.launches


def test_the_doctor_always_tries_again(machine, child, monkeypatch):
    started = child(RIGHT)
    for number in (3, 6):
        monkeypatch.setattr(self_test, "_results", {})
        found = {report.name: report for report in diagnose(TWO).backends}
        assert found["direct"].failure is found["ring"].failure is None
        assert len(started) == number
    child(NO)
    found = {report.name: report for report in diagnose(TWO).backends}
    assert found["direct"].failure == "replica 1 got 3 instead of 4"


def test_a_process_tries_a_backend_and_finds_nothing(monkeypatch, tmp_path):
    (tmp_path / "torch.py").write_text("raise SystemExit('the wrong torch')")
    if sys.version_info >= (3, 11):  # before, Python looks there first
        monkeypatch.chdir(tmp_path)
    assert run_probe(DirectCommunicator, ["cpu"] * 2) is None


@pytest.fixture
def run_main(monkeypatch, capsys):
    """Gives ``run_main(kind)``: what the program says of a class of this file, in this process."""
    monkeypatch.setattr(
        subprocess_probe_main.faulthandler, "dump_traceback_later", lambda *_, **__: None
    )

    def run(kind, *devices):
        monkeypatch.setattr(subprocess_probe_main.pkgutil, "resolve_name", lambda name: kind)
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


def test_it_says_how_far_it_is_and_what_it_found(run_main):
    assert run_main(Right) == [*STATES, {"result": None}]
    *states, found = run_main(Wrong)
    assert states == STATES
    assert found["result"].startswith("BackendError: replica 0 (cpu) got 2.0 instead of 1.0")
    assert run_main(Broken) == [STATES[0], {"result": "OSError: no peers"}]


def test_memory_that_others_have_and_devices_that_are_not_there_are_no_verdict(run_main):
    assert run_main(Large) == [*STATES[:2], {"unavailable": "CUDA out of memory"}]
    ((word, text),) = run_main(Right, "cuda:99")[0].items()
    assert (word, text[:33]) == ("unavailable", "DeviceError: 'cuda:99' does not e")


def test_what_it_says_is_out_before_it_goes_on(run_main, monkeypatch):
    told = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(told, write_through=False))
    lines = []

    class Looking(Right):
        def __init__(self, devices, *, timeout_seconds):
            lines.append(told.getvalue())  # what is read of it, should it end here
            super().__init__(devices, timeout_seconds=timeout_seconds)

    run_main(Looking)
    assert lines == [b'\nTOKEN {"state": "started"}\n']


FACTS = {"gpus": ["one", "other"], "peers": ((True, False), (False, True)), "driver": "550"}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache" / "trials"


def test_a_verdict_comes_back_for_the_same_facts_in_any_order(folder):
    for reason in (None, "it hung"):
        assert load_verdict({**FACTS, "reason": reason}) is None
        store({**FACTS, "reason": reason}, Verdict(reason))
        backwards = dict(reversed({**FACTS, "reason": reason}.items()))
        assert load_verdict(backwards) == Verdict(reason)
    assert len(list(folder.iterdir())) == 2


def test_what_cannot_be_kept_leaves_nothing_behind(folder, monkeypatch):
    """A full disk, say; the next process tries it again."""

    def full(*paths):
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "replace", full)
    store(FACTS, Verdict(None))
    assert load_verdict(FACTS) is None
    assert not list(folder.iterdir())


@pytest.mark.parametrize("name", FACTS)
def test_another_fact_is_another_machine(folder, name):
    store(FACTS, Verdict(None))
    assert load_verdict({**FACTS, name: "changed"}) is None
    assert load_verdict({**FACTS, "more": 1}) is None


def test_the_last_verdict_counts(folder):
    store(FACTS, Verdict("it hung"))
    store(FACTS, Verdict(None))
    assert load_verdict(FACTS) == Verdict(None)


@pytest.mark.parametrize(("hours", "counts"), [(1, True), (23, True), (25, False), (-1, False)])
def test_a_failure_counts_for_a_day_and_a_success_forever(folder, monkeypatch, hours, counts):
    now = subprocess_probe.time()
    store({"passed": 1}, Verdict(None))
    store(FACTS, Verdict("it hung"))
    monkeypatch.setattr(subprocess_probe, "time", lambda: now + 3600 * hours)
    assert (load_verdict(FACTS) is not None) == counts
    assert load_verdict({"passed": 1}) == Verdict(None)


GOOD = json.dumps({"facts": json.loads(json.dumps(FACTS)), "reason": None, "when": 0.0})


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "null", "[]", "7", '"x"', GOOD[:-9], GOOD.replace("null", "7"),
        GOOD.replace("0.0", "null"), GOOD.replace("550", "551"), "[" * 100_000,
        GOOD.encode() + b"\xff", GOOD.replace('"reason"', '"season"'),
    ],
)  # fmt: skip
def test_what_is_damaged_is_as_if_it_was_not_there(folder, text):
    store(FACTS, Verdict(None))
    (file,) = folder.iterdir()
    file.write_text(GOOD)
    assert load_verdict(FACTS) == Verdict(None)
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert load_verdict(FACTS) is None
    store(FACTS, Verdict(None))
    assert load_verdict(FACTS) == Verdict(None)


def test_a_folder_that_takes_nothing_is_no_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    for place in ("", str(tmp_path / "file" / "below"), "/proc/nowhere"):
        monkeypatch.setenv(FOLDER_VARIABLE, place)
        store(FACTS, Verdict(None))
        assert load_verdict(FACTS) is None


def test_it_is_where_caches_are(tmp_path, monkeypatch):
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    store(FACTS, Verdict(None))
    assert len(list((tmp_path / "xdg" / "mirror" / "trials").iterdir())) == 1
    for relative in ("", "caches"):
        monkeypatch.setenv("XDG_CACHE_HOME", relative)
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        store(FACTS, Verdict(None))
    assert len(os.listdir(tmp_path / "home" / ".cache" / "mirror" / "trials")) == 1
    monkeypatch.setattr(subprocess_probe.Path, "home", no_home)
    assert load_verdict(FACTS) is None


def no_home():
    raise RuntimeError("Could not determine home directory.")
