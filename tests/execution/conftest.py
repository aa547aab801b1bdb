"""Four replicas under each schedule."""

import pytest

from tests.execution.failing import N


@pytest.fixture(params=["lockstep", "staggered", "parallel"])
def strategy(request, make_strategy, long_drain):
    return make_strategy(N, schedule=request.param)


@pytest.fixture(autouse=True)
def switch_threads_often(threads_switch_often):
    """Finds races of a few instructions."""
