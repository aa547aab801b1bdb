"""Three replicas under each schedule."""

import pytest


@pytest.fixture(params=["lockstep", "staggered", "parallel"])
def strategy(request, make_strategy):
    return make_strategy(3, schedule=request.param)


@pytest.fixture(autouse=True)
def switch_threads_often(threads_switch_often):
    """Finds races of a few instructions."""
