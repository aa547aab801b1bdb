"""Three replicas under either schedule."""

import pytest


@pytest.fixture(params=["lockstep", "staggered"])
def strategy(request, make_strategy):
    return make_strategy(3, schedule=request.param)
