"""Calls the compiled steps of all tests here inside the scope, as the README does.

One case of every third quick test also calls them outside; the other cases do so in
``make exhaustive-test``.
"""

import pytest

from mirror.compiler.runtime.compiled_step import CompiledStep
from tests.pairs import EXHAUSTIVE


@pytest.fixture(autouse=True, params=["inside", pytest.param("outside", marks=pytest.mark.slow)])
def where_compiled_steps_are_called(request, monkeypatch):
    if request.param == "outside":
        return
    call = CompiledStep.__call__

    def call_inside(self, *args, **kwargs):
        with self._param_sync._replicas.strategy.scope():
            return call(self, *args, **kwargs)

    monkeypatch.setattr(CompiledStep, "__call__", call_inside)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Leaves one case of every third quick test of a file outside; the rest is exhaustive."""
    seen: dict[str, list[str]] = {}
    for item in items:
        params = getattr(item, "callspec", None) and item.callspec.params
        if not params or params.get("where_compiled_steps_are_called") != "outside":
            continue
        is_slow_itself = sum(mark.name == "slow" for mark in item.iter_markers()) > 1
        test = item.nodeid.partition("[")[0]
        of_file = seen.setdefault(test.partition("::")[0], [])
        is_first = test not in of_file and not is_slow_itself
        if is_first:
            of_file.append(test)
        if not is_first or len(of_file) % 3 != 1:
            for mark in EXHAUSTIVE:
                item.add_marker(mark)
