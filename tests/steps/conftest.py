"""Calls the compiled steps of all tests here inside the scope, as the README's programs do."""

import pytest

from mirror.steps.running.compiled_step import CompiledStep
from mirror.strategy.base import Strategy


@pytest.fixture(autouse=True, params=["inside", pytest.param("outside", marks=pytest.mark.slow)])
def where_compiled_steps_are_called(request, monkeypatch):
    if request.param == "outside":
        return
    compile_step, call = Strategy.compile, CompiledStep.__call__
    strategies = {}

    def compile_for_scope(self, *args, **kwargs):
        compiled = compile_step(self, *args, **kwargs)
        strategies[id(compiled)] = self
        return compiled

    def call_inside(self, *args, **kwargs):
        with strategies[id(self)].scope():
            return call(self, *args, **kwargs)

    monkeypatch.setattr(Strategy, "compile", compile_for_scope)
    monkeypatch.setattr(CompiledStep, "__call__", call_inside)
