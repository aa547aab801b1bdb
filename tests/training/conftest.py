"""Fixtures that run a script on one device, then on replicas, and compare what it returns."""

import pytest

from tests.training.programs import Place, compare

PLACES = {
    f"{name}-x{n}": (n, in_run)
    for name, in_run in (("loop", False), ("run", True))
    for n in (2, 3)
}


@pytest.fixture(params=PLACES.values(), ids=list(PLACES))
def same(request, make_strategy):
    """Gives ``same(script)``: runs a script on one device and on replicas and compares."""
    n, in_run = request.param

    def check(script, tolerance=None):
        return compare(script, Place(make_strategy(n), in_run), tolerance)

    return check


@pytest.fixture(params=[2, 3], ids=["loop-x2", "loop-x3"])
def same_loop(request, make_strategy):
    """The same for what belongs outside run only."""

    def check(script, tolerance=None):
        return compare(script, Place(make_strategy(request.param)), tolerance)

    return check


@pytest.fixture(params=[2, 3], ids=["run-x2", "run-x3"])
def same_run(request, make_strategy):
    """The same for what belongs inside run only."""

    def check(script, tolerance=None):
        return compare(script, Place(make_strategy(request.param), True), tolerance)

    return check
