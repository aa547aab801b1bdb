"""The strategy of the catalogue: two simulated devices."""

import pytest

import mirror


@pytest.fixture
def strategy():
    with mirror.MirroredStrategy(["cpu"] * 2) as strategy:
        yield strategy
