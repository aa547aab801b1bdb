"""Checks that prefetching threads and processes end with their test."""

import gc

import pytest


@pytest.fixture
def leave_nothing_behind(leaks):
    yield
    gc.collect()
    assert leaks.threads("mirror input") == []
    assert leaks.processes() == []
