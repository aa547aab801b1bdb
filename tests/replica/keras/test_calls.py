"""Keras models in a scope, compiled and fitted as always: equal to one device."""

import pytest

from tests.replica.keras.programs import outcomes

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "name",
    [
        "dense",
        "built by fit",
        "add_loss",
        "activity regularizer",
        "parts of torch and Keras",
        "train_step",
    ],
)
def test_fit_evaluate_and_predict_equal_one_device(name):
    assert outcomes()[name] < 1e-5


def test_dropout_is_reproducible_and_unlike_on_each_replica():
    assert outcomes()["dropout"] == {"reproducible": True, "different": True, "new": True}


def test_losses_that_a_layer_adds_inside_run_are_refused():
    assert "StrategyError: " in outcomes()["loss in run"]
    assert "outside run, as fit does" in outcomes()["loss in run"]
