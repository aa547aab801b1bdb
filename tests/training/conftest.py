"""Fixtures that run a script on one device and on replicas, and compare the results."""

import pytest

from tests.pairs import EXHAUSTIVE
from tests.training.programs import Place, compare


def places(*ways):
    """Where scripts run: replicas that mirror, and such as have a home beside them."""
    for kind, marks in (("", {2: (), 3: ()}), ("central-", {2: EXHAUSTIVE, 3: pytest.mark.slow})):
        for way in ways:
            for n in (2, 3):
                place = (kind, n, way == "run")
                yield pytest.param(place, id=f"{kind}{way}-x{n}", marks=marks[n])


def comparing(request):
    """Returns what runs a script in the place that is the fixture's parameter, and compares."""
    kind, n, in_run = request.param
    make = request.getfixturevalue("central" if kind else "make_strategy")

    def check(script, tolerance=None):
        return compare(script, Place(make(n), in_run), tolerance)

    return check


@pytest.fixture(params=places("loop", "run"))
def same(request):
    """Gives ``same(script)``: runs a script on one device and on replicas and compares."""
    return comparing(request)


@pytest.fixture(params=places("loop"))
def same_loop(request):
    """The same for what belongs outside run only."""
    return comparing(request)


@pytest.fixture(params=places("run"))
def same_run(request):
    """The same for what belongs inside run only."""
    return comparing(request)
