"""Three replicas under each schedule."""

import pytest


@pytest.fixture(params=["lockstep", "staggered", "parallel"])
def strategy(request, make_strategy):
    return make_strategy(3, schedule=request.param)
