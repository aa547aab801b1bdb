"""Which engine a name gives."""

import sys
import types

import pytest

from mirror.errors import BackendError
from mirror.server.engine.choose import make_engine
from mirror.server.engine.processes import ProcessEngine


@pytest.mark.parametrize("name", ["auto", "process"])
def test_processes_are_the_default(name, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", types.SimpleNamespace(is_initialized=lambda: False))
    with make_engine(name) as engine:
        assert isinstance(engine, ProcessEngine)


def test_an_unknown_name_is_refused():
    with pytest.raises(BackendError, match="auto, process, ray; got 'grpc'"):
        make_engine("grpc")
