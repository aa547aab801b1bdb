"""What Keras layers assign in their call becomes what one device would have assigned."""

import pytest

from tests.replica.keras.programs import outcomes

pytestmark = pytest.mark.slow


def test_moving_statistics_are_of_the_whole_batch():
    assert outcomes()["moving statistics"] == pytest.approx([58, 59, 60, 61], rel=1e-5)


def test_means_and_counts_of_examples_equal_one_device():
    assert outcomes()["state"] < 1e-5


def test_trainable_variables_are_not_assigned_in_a_call():
    assert "StrategyError: " in outcomes()["assigns trainable"]
    assert "assigns trainable variable" in outcomes()["assigns trainable"]


@pytest.mark.parametrize("name", ["differing integers", "count in run", "one example each"])
def test_integers_that_cannot_be_joined_are_refused(name):
    assert "StrategyError: " in outcomes()[name]
    assert 'aggregation="sum"' in outcomes()[name]
