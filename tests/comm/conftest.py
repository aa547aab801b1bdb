"""Fixtures for the tests of backends."""

import pytest

from tests.comm.nccl.fake_nccl import MISSING, FakeNccl


@pytest.fixture
def fake():
    """A libnccl that works on the CPU, and fails on order; nothing of it may be left behind."""
    if MISSING:
        pytest.skip(MISSING)
    fake = FakeNccl()
    yield fake
    fake.assert_nothing_is_left()
