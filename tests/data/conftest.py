"""What reads ahead is gone after a test."""

import gc
import multiprocessing

import pytest

from tests.data.reading import threads


@pytest.fixture
def leave_nothing_behind():
    before = multiprocessing.active_children()
    assert threads() == []
    yield
    gc.collect()
    assert threads() == []
    assert multiprocessing.active_children() == before
