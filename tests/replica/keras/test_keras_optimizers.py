"""A Keras optimizer that is applied inside run steps once, and ends a step wherever it is."""

import pytest

from tests.replica.keras.programs import outcomes

pytestmark = pytest.mark.slow


def test_apply_inside_run_is_one_step():
    outcome = outcomes()["apply in run"]
    assert outcome["iterations"] == 4
    assert outcome["weights"] < 1e-5


def test_apply_ends_a_step_once_also_if_optimizers_are_wrapped():
    assert outcomes()["ends of steps"] == {"one": [6, 6], "wrapped": [6, 6], "several": [6, 6]}
