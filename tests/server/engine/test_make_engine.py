"""Which engine a name gives."""

import sys
import types

import pytest

from mirror.errors import BackendError
from mirror.server.engine.process_engine import ProcessEngine, make_engine


@pytest.fixture(autouse=True)
def no_job_of_ray(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@pytest.mark.parametrize("name", ["auto", "process"])
def test_processes_are_the_default(name, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", types.SimpleNamespace(is_initialized=lambda: False))
    with make_engine(name) as engine:
        assert isinstance(engine, ProcessEngine)


def test_an_unknown_name_is_refused():
    with pytest.raises(BackendError, match="auto, process, ray; got 'grpc'"):
        make_engine("grpc")


def test_without_ray_its_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "mirror.server.engine.ray_engine", raising=False)
    with pytest.raises(BackendError, match=r"pip install 'mirror-strategy\[ray\]'"):
        make_engine("ray")
