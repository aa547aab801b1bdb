"""benchmarks/first_run.py and supervised.py report what cannot be checked, hangs or crashes."""

import importlib
import json
import os
import select
import subprocess
import sys
import types
from dataclasses import fields, replace
from pathlib import Path

import pytest

from tests.pairs import EXHAUSTIVE

pytestmark = list(EXHAUSTIVE)  # programs that measure: what breaks them may be found a day later

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
NEEDS = ("gpu", "two_gpus", "libraries", "cupy", "nccl", "peers", "sanitizer", "pytest")


@pytest.fixture
def first_run(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("first_run")


@pytest.fixture
def whole(first_run):
    """A machine that has everything."""
    machine = first_run.Machine(**dict.fromkeys(NEEDS))
    assert [field.name for field in fields(machine)] == list(NEEDS)
    return machine


def check(name, state, detail):
    return {"name": name, "state": state, "seconds": 1.0, "detail": detail}


@pytest.fixture
def runs(first_run, monkeypatch):
    """The programs that were run; a program with ``runs.failing`` in its arguments fails."""

    class Runs(list):
        failing, seconds, now = None, (), 0.0

    runs = Runs()
    monkeypatch.setattr(first_run, "monotonic", lambda: runs.now)

    def run(command, seconds, env):
        runs.append((command, dict(env)))
        runs.seconds += (seconds,)
        if runs.failing == "time":
            runs.now += seconds
        if "--json" in command:
            state = "failed" if runs.failing == "gpu_check" else "passed"
            found = {"checks": [check("ring, all GPUs", state, "8 GB/s")]}
            Path(command[command.index("--json") + 1]).write_text(json.dumps(found))
        if runs.failing in command:
            return 1, "Traceback ...\nValueError: no such kernel\n"
        return 0, "9 passed\n"

    monkeypatch.setattr(first_run, "_run", run)
    return runs


def test_everything_is_run_in_order_and_is_one_table_and_one_file(
    first_run, whole, runs, capsys, tmp_path
):
    found = tmp_path / "found.json"
    assert first_run.main(["--json", str(found)], look=lambda: whole) == 0
    rows = json.loads(found.read_text())
    names = [row["name"] for row in rows]
    assert names[len(NEEDS) :] == [
        "gpu_check: ring, all GPUs",
        "the kernels' own tests",
        "modules loaded when first used: ring, all GPUs",
        "segments that grow: ring, all GPUs",
        "threads that launch on all GPUs",
        "direct under compute-sanitizer",
        "ring under compute-sanitizer",
        "hierarchical under compute-sanitizer",
    ]
    assert {row["state"] for row in rows} == {"passed"}
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(rows)
    assert all(row["name"] in line for row, line in zip(rows, lines, strict=True))
    (_, alone), (tests, _), (_, lazy), (_, segments), (threads, _), *sanitized = runs
    assert tests[-1].endswith("test_cuda_kernels.py")
    assert alone == {}
    assert threads[-1] == "benchmarks/gpu_threads.py"
    assert lazy["CUDA_MODULE_LOADING"] == "LAZY"
    assert segments["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert lazy["CUDA_VISIBLE_DEVICES"] == segments["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert {tuple(command[:3]) for command, _ in sanitized} == {
        ("compute-sanitizer", "--tool", "memcheck")
    }


@pytest.mark.parametrize("need", NEEDS)
def test_what_a_machine_lacks_is_reported_and_what_needs_it_is_skipped(
    first_run, whole, runs, capsys, need
):
    lacking = replace(whole, **{need: f"there is no {need} here"})
    assert first_run.main([], look=lambda: lacking) == 0
    lines = capsys.readouterr().out.splitlines()
    without = [line for line in lines if line.endswith(f"there is no {need} here")]
    assert all(line.startswith("skipped") for line in without)
    numbers = {"gpu": 5, "two_gpus": 3, "libraries": 4, "cupy": 4, "sanitizer": 3, "pytest": 1}
    num_parts = numbers.get(need, 0)
    assert len(without) == 1 + num_parts  # itself, and every part that needs it
    assert len(runs) == 8 - num_parts
    assert not any("Traceback" in line for line in lines)


@pytest.mark.parametrize("failing", ["gpu_check", "compute-sanitizer"])
def test_what_fails_is_a_row(first_run, whole, runs, capsys, failing):
    runs.failing = failing
    assert first_run.main([], look=lambda: whole) == 1
    failed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("failed")]
    if failing == "gpu_check":
        assert "gpu_check: ring, all GPUs" in failed[0]
        assert len(failed) == 3
    else:
        assert failed[0].endswith("1: ValueError: no such kernel")


@pytest.mark.parametrize(
    ("program", "state", "detail"),
    [
        ("print('1 passed')", "passed", "1 passed"),
        ("import sys; sys.exit('out of memory')", "failed", "1: out of memory"),
        ("import os; os.abort()", "failed", "-6: it said nothing"),
        ("import time; time.sleep(1000)", "failed", "did not end within 2 s: it said nothing"),
        ("print('ERROR SUMMARY: 3 errors')", "failed", "ERROR SUMMARY: 3 errors"),
        ("print('ERROR SUMMARY: 0 errors')", "passed", "ERROR SUMMARY: 0 errors"),
    ],
)
def test_a_program_passes_fails_or_is_late(first_run, program, state, detail):
    seconds = 2 if "sleep" in program else 600  # a busy machine starts Python slowly
    part = first_run.Part(
        "x", (sys.executable, "-c", program), (), seconds, fails_by="ERROR SUMMARY: [1-9].*"
    )
    (row,) = first_run.outcomes_of(part, seconds)
    assert (row.state, row.detail) == (state, detail)


ONE_GPU = {"two_gpus": "torch sees one GPU only", "sanitizer": "there is none"}


@pytest.mark.parametrize(
    ("options", "lacking", "minutes"),
    [([], ONE_GPU, 8), (["--quick"], ONE_GPU, 3), (["--quick"], {}, 3), ([], {}, 30)],
)
def test_programs_that_use_all_their_time_end_within_the_budget(
    first_run, whole, runs, options, lacking, minutes
):
    runs.failing = "time"
    first_run.main(options, look=lambda: replace(whole, **lacking))
    assert runs.now == sum(runs.seconds) < 60 * minutes
    command, _ = runs[0]
    assert command[1] == "benchmarks/gpu_check.py"
    # It ends before it is killed, and has most of the time of one GPU.
    assert 0 < float(command[command.index("--budget") + 1]) < runs.seconds[0]
    assert runs.seconds[0] > 0.8 * 60 * min(minutes, 8)


def test_what_does_not_fit_is_left_out(first_run, whole, runs, capsys):
    runs.failing = "time"
    first_run.main(["--budget", "60"], look=lambda: whole)
    left_out = [line for line in capsys.readouterr().out.splitlines() if "no time" in line]
    assert len(runs) + len(left_out) == 8
    assert all(line.startswith("skipped") for line in left_out)
    assert runs.now <= 60


def test_libraries_that_a_checkout_lacks_are_built(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(BENCHMARKS)
    checkout = importlib.import_module("checkout")
    assert checkout.build_libraries() is None  # there are all
    (tmp_path / "csrc" / "host").mkdir(parents=True)
    (tmp_path / "csrc" / "host" / "reduce.cpp").touch()
    (tmp_path / "setup.py").write_text("import sys; sys.exit('there is no g++')")
    failed = checkout.build_libraries(tmp_path)
    assert failed.startswith("_reduce.so are not built, and `python setup.py build_ext --inplace`")
    assert failed.endswith("failed: there is no g++")
    (tmp_path / "setup.py").write_text("")
    assert checkout.build_libraries(tmp_path) is None


def test_programs_run_from_a_checkout_that_is_not_installed(tmp_path):
    checkout = tmp_path / "checkout"
    for folder in ("benchmarks", "mirror"):
        (checkout / folder).mkdir(parents=True)
    for name in ("arguments.py", "checkout.py"):
        (checkout / "benchmarks" / name).write_text((BENCHMARKS / name).read_text())
    (checkout / "mirror" / "__init__.py").write_text("print(__file__)")
    program = checkout / "benchmarks" / "program.py"
    program.write_text(
        "import subprocess, sys\n"
        "import arguments\n"
        "import mirror\n"
        "subprocess.run([sys.executable, '-S', '-c', 'import mirror'], check=True)\n"
    )
    # -S: without the packages of this environment.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    result = subprocess.run(
        [sys.executable, "-S", program],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert result.stdout == f"{checkout / 'mirror' / '__init__.py'}\n" * 2, result.stderr


def test_this_machine_is_looked_at_without_a_traceback(first_run, capsys):
    found = first_run.machine()
    for name in NEEDS:
        why = getattr(found, name)
        assert why is None or (why and "\n" not in why)
    assert found.pytest is None


# Its checks: what they do is their name; no import of torch.
PROGRAM = """
import os, sys, time, types

sys.path.insert(0, {benchmarks!r})


class Skipped(Exception):
    pass


sys.modules["checking"] = types.SimpleNamespace(Skipped=Skipped)
from supervised import work


def check(name):
    if name == "hangs":
        os.system("sleep 1000 &")
        open({hangs!r}, "w").close()
        time.sleep(1000)
    if name == "crashes":
        os.abort()
    if name == "ends":
        os._exit(3)
    if name == "fails":
        raise AssertionError("replica 1 has a wrong sum")
    if name == "is skipped":
        raise Skipped("there is no CuPy")
    return "42"


names = sys.argv[1].split(",")
work([(n, lambda n=n: check(n)) for n in names], int(sys.argv[2]), int(sys.argv[3]))
"""


@pytest.fixture
def supervise(monkeypatch, tmp_path):
    """Gives ``supervise`` with a clock that advances only while a check hangs."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    supervised = importlib.import_module("supervised")
    program, hangs = tmp_path / "program.py", tmp_path / "hangs"
    program.write_text(PROGRAM.format(benchmarks=str(BENCHMARKS), hangs=str(hangs)))
    now = [0.0]

    def wait(pipes, _, __, seconds):
        while True:
            found = select.select(pipes, [], [], 0.05)
            if found[0]:
                return found
            if hangs.exists():
                hangs.unlink()
                now[0] += seconds
                return [], [], []

    monkeypatch.setattr(supervised, "monotonic", lambda: now[0])
    monkeypatch.setattr(supervised, "select", types.SimpleNamespace(select=wait))

    def run(names, **limits):
        command = [sys.executable, str(program), ",".join(names)]
        return list(supervised.supervise(command, names, **limits))

    return run


def test_every_check_has_an_outcome_even_if_another_crashes_or_hangs(supervise):
    names = ["passes", "fails", "crashes", "is skipped", "hangs", "ends", "passes too"]
    outcomes = supervise(names, deadline_seconds=4, budget_seconds=100)
    assert [outcome.name for outcome in outcomes] == names
    assert [(outcome.state, outcome.detail) for outcome in outcomes] == [
        ("passed", "42"),
        ("failed", "AssertionError: replica 1 has a wrong sum"),
        ("failed", "its process ended by SIGABRT"),
        ("skipped", "there is no CuPy"),
        ("failed", "did not end within 4 s; its process was killed"),
        ("failed", "its process ended with status 3"),
        ("passed", "42"),
    ]


def test_what_the_budget_has_no_time_for_is_skipped(supervise):
    outcomes = supervise(["hangs", "passes"], deadline_seconds=100, budget_seconds=1)
    assert [outcome.state for outcome in outcomes] == ["failed", "skipped"]
    assert outcomes[0].seconds == 1
    assert outcomes[1].detail == "left out: no time in 1 s"
