"""Three replicas and a small model on them."""

import pytest

from tests.replica.params.coherence import N, Net


@pytest.fixture
def strategy(make_strategy):
    return make_strategy(N)


@pytest.fixture
def model(strategy):
    return strategy.mirror(Net())
