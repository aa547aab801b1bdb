"""Fixtures that run a script on one device and on replicas, and compare the results."""

import pytest

from tests.one_memory import one_memory  # noqa: F401
from tests.pairs import EXHAUSTIVE
from tests.training.programs import Place, compare


def places(*ways):
    """Where scripts run: replicas that mirror, and such as have a home beside them.

    Quick are three replicas in a loop and two in run; slow is one way beside a home.
    """
    for kind in ("", "central-"):
        for way in ways:
            for n in (2, 3):
                if kind:
                    marks = pytest.mark.slow if (n, way) == (3, ways[-1]) else EXHAUSTIVE
                else:
                    marks = () if n == {"loop": 3, "run": 2}[way] else EXHAUSTIVE
                yield pytest.param((kind, n, way == "run"), id=f"{kind}{way}-x{n}", marks=marks)


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
