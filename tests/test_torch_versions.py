"""The supported versions of torch and Python, and the substitutes for missing names."""

import inspect
import json
import re
import threading
from pathlib import Path

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from mirror import cli
from mirror.base import torch_private
from mirror.base.torch_private import (
    NEWEST_TORCH,
    OLDEST_TORCH,
    PYTHON_RANGE,
    TORCH_RANGE,
    range_warnings,
)
from mirror.execution.run import current

ROOT = Path(__file__).parents[1]


def test_pyproject_promises_what_was_seen():
    text = (ROOT / "pyproject.toml").read_text()
    (oldest, beyond) = re.findall(r'"torch>=([\d.]+),<([\d.]+)"', text)[0]
    assert oldest == "{}.{}".format(*OLDEST_TORCH)
    assert beyond == f"{NEWEST_TORCH[0]}.{NEWEST_TORCH[1] + 1}"
    pythons = re.findall(r'Python :: (3\.\d+)"', text)
    assert f"{pythons[0]} to {pythons[-1]}" == PYTHON_RANGE


def test_the_table_has_every_promised_version():
    text = (ROOT / "docs" / "torch-versions.md").read_text()
    rows = re.findall(r"^\| (\d+\.\d+)\.\d+ \|(.*)\|$", text, re.MULTILINE)
    seen = [version for version, marks in rows if "seen" in marks]
    major, first, last = OLDEST_TORCH[0], OLDEST_TORCH[1], NEWEST_TORCH[1]
    assert seen == [f"{major}.{minor}" for minor in range(first, last + 1)]
    assert f"torch {TORCH_RANGE}" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize(
    ("version", "is_promised"),
    [("2.6.1", False), ("2.7.0+cu126", True), ("2.15.2", True), ("2.16.0a0+git12", False)],
)
def test_the_doctor_warns_outside_the_range(version, is_promised, monkeypatch, capsys):
    monkeypatch.setattr(torch, "__version__", version)
    warnings = range_warnings()
    assert len(warnings) == (0 if is_promised else 1)
    assert cli.main(["doctor", "--devices", "cpu"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert (f"WARNING this is torch {version}" in text) is not is_promised
    assert cli.main(["doctor", "--json", "--devices", "cpu"]) == 0
    assert json.loads(capsys.readouterr().out)["warnings"] == list(warnings)


IN_2_99 = """
import sys, torch
for name in [name for name in sys.modules if name.partition(".")[0] == "mirror"]:
    del sys.modules[name]
torch.__version__ = "2.99.0"
import mirror
print(mirror.has_strategy())
"""


def test_mirror_can_be_imported_outside_the_range(script_pool):
    done = script_pool.run(IN_2_99)
    assert (done.returncode, done.stdout, done.stderr) == (0, "False\n", "")


@pytest.mark.slow
def test_the_smoke_passes_here(script_pool):
    done = script_pool.run_file(ROOT / "tests" / "scripts" / "smoke.py", timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"seen: torch {torch.__version__}")


def test_what_is_current_is_no_attribute_of_a_class():
    """Before torch 2.11 the compiler takes a class's attribute for the one of a thread-local."""
    for name in ("replica", "strategy", "in_whole_call"):
        assert hasattr(current, name)
        assert not hasattr(type(current), name)
        assert inspect.getattr_static(current, name, None) is None


def test_hooks_are_recorded_where_torch_does_not_report_them(monkeypatch):
    """As torch.autograd does since 2.8: the innermost pair of the calling thread."""
    for name in ("_push_saved_tensors_default_hooks", "_pop_saved_tensors_default_hooks"):
        monkeypatch.setattr(torch._C._autograd, name, getattr(torch._C._autograd, name))
    stack = torch_private._HookStack()
    stack.install()
    outer, inner, elsewhere = ((lambda x: x, lambda x: x) for _ in range(3))
    tops = []

    def record():
        tops.append((stack.top(), torch_private.top_saved_tensors_hooks()))

    def thread():
        record()
        with saved_tensors_hooks(*elsewhere):
            record()

    record()
    with saved_tensors_hooks(*outer):
        record()
        with pytest.raises(ValueError, match="left"), saved_tensors_hooks(*inner):
            record()
            other = threading.Thread(target=thread)
            other.start()
            other.join()
            raise ValueError("left")
        record()
    record()
    expected = [None, outer, inner, None, elsewhere, outer, None]
    assert tops == [(pair, pair) for pair in expected]


@pytest.mark.parametrize("kind", [classmethod, None])
def test_functions_are_applied_wherever_their_method_is_written(kind, monkeypatch):
    """From torch 2.15 on Function.apply is a method of C; dict.fromkeys is one of that kind."""
    method = (
        classmethod(lambda cls, keys: dict.fromkeys(keys)) if kind else dict.__dict__["fromkeys"]
    )
    holder = type("Holder", (dict,), {"apply": method})
    monkeypatch.setattr(torch.autograd, "Function", holder)
    assert torch_private.plain_apply()(holder, "ab") == {"a": None, "b": None}
