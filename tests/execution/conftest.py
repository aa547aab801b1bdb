"""Four replicas under either schedule."""

import pytest

from tests.execution.failing import N


@pytest.fixture(params=["lockstep", "staggered"])
def strategy(request, make_strategy, nobody_drains):
    return make_strategy(N, schedule=request.param)
