"""Three replicas under either schedule."""

import pytest

from tests.concurrency.meeting import N


@pytest.fixture(params=["lockstep", "staggered"])
def strategy(request, make_strategy):
    return make_strategy(N, schedule=request.param)
