"""What reads ahead is gone after a test."""

import gc

import pytest


@pytest.fixture
def leave_nothing_behind(leaks):
    yield
    gc.collect()
    assert leaks.threads("mirror input") == []
    assert leaks.processes() == []
