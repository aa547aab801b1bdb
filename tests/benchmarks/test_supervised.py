"""benchmarks/supervised.py: checks that hang, crash or fail cost one check each, and no more."""

import importlib
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

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
    monkeypatch.syspath_prepend(BENCHMARKS)
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(benchmarks=str(BENCHMARKS)))

    def run(names, **limits):
        command = [sys.executable, str(program), ",".join(names)]
        return list(importlib.import_module("supervised").supervise(command, names, **limits))

    return run


def test_every_check_has_an_outcome_whatever_the_others_do(supervise):
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
    assert outcomes[0].seconds < 100
    assert outcomes[1].detail == "the budget of 1 s is spent"
