"""Fixtures for the tests of backends."""

import pytest

from tests.comm.backends import PARAMS, THREE, create
from tests.comm.nccl.fake_nccl import MISSING, FakeNccl


@pytest.fixture
def fake():
    """A libnccl that works on the CPU, and fails on order; nothing of it may be left behind."""
    if MISSING:
        pytest.skip(MISSING)
    fake = FakeNccl()
    yield fake
    fake.assert_nothing_is_left()


@pytest.fixture(params=THREE)
def three(request):
    communicator = create(request.param, ["cpu"] * 3)
    yield communicator
    communicator.close()


@pytest.fixture(params=PARAMS)
def communicator(request):
    communicator = create(*request.param)
    yield communicator
    communicator.close()
