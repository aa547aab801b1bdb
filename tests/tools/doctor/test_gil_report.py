"""mirror doctor says whether the GIL is on, and which import turns it on."""

import subprocess

import pytest

from mirror.tools import diagnosis
from mirror.tools.diagnosis import examine_gil

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
