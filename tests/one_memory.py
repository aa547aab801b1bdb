"""A fixture for all tests of a folder: what forward reads is what optimizers step."""

import pytest

from mirror.replica.gradients.grad_access import GradAccess
from mirror.replica.optimizers import optimizer_registry


@pytest.fixture(autouse=True)
def one_memory(monkeypatch):
    """Fails a test that leaves a parameter whose copies and targets are not one memory.

    It compares addresses alone: of parameters that are freed, when they are, and of all that are
    alive after the test.
    """
    found = []

    def check(variable):
        apart = variable.explain_apart()
        if apart is not None:
            found.append(f"{variable.name}: {apart}")

    def check_and_forget(self, variable):
        check(variable)
        forget(self, variable)

    forget = GradAccess.forget
    monkeypatch.setattr(GradAccess, "forget", check_and_forget)
    yield
    for optimizers in optimizer_registry._known.all():
        group = getattr(optimizers.replicas.strategy, "_group", None)  # none while it is made
        for variable in () if group is None else group.variables:
            check(variable)
    assert found == []
