"""What reads ahead is gone after a test."""

import gc

import pytest


@pytest.fixture
def leave_nothing_behind(begun):
    yield
    gc.collect()
    assert begun.threads("mirror input") == []
    assert begun.processes() == []
