"""A Keras optimizer that is applied inside run steps once."""

import pytest

from tests.replica.keras.programs import outcomes

pytestmark = pytest.mark.slow


def test_apply_inside_run_is_one_step():
    outcome = outcomes()["apply in run"]
    assert outcome["iterations"] == 4
    assert outcome["weights"] < 1e-5
