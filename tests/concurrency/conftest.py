"""Three replicas under either schedule."""

import sys

import pytest

from tests.concurrency.meeting import N


@pytest.fixture(params=["lockstep", "staggered"])
def strategy(request, make_strategy):
    return make_strategy(N, schedule=request.param)


@pytest.fixture(autouse=True)
def threads_switch_often():
    """Switches threads 5,000 times as often as usual, which finds races of a few instructions."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)
