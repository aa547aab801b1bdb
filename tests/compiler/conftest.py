"""Calls the compiled steps of all tests here inside the scope, as the README does."""

import pytest

from mirror.compiler.runtime.compiled_step import CompiledStep


@pytest.fixture(autouse=True, params=["inside", pytest.param("outside", marks=pytest.mark.slow)])
def where_compiled_steps_are_called(request, monkeypatch):
    if request.param == "outside":
        return
    call = CompiledStep.__call__

    def call_inside(self, *args, **kwargs):
        with self._param_sync._replicas.strategy.scope():
            return call(self, *args, **kwargs)

    monkeypatch.setattr(CompiledStep, "__call__", call_inside)
