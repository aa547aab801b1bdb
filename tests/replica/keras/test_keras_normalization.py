"""mirror.keras.SyncBatchNormalization: batch normalisation over the whole batch."""

import pytest

from tests.replica.keras.programs import outcomes

pytestmark = pytest.mark.slow


def test_it_equals_batch_normalization_on_one_device():
    assert outcomes()["normalization"] < 1e-5


def test_its_moments_of_two_examples_differ_by_rounding_alone():
    assert outcomes()["moments"] < 1e-13


def test_it_is_saved_loaded_and_cloned():
    outcome = outcomes()["saved"]
    assert outcome["kinds"] == ["SyncBatchNormalization"] * 2
    assert outcome["difference"] < 1e-6
