"""Keras in a scope: models, layers, normalization and optimizers are equal to one device."""

import pytest

from tests.integrations.keras.programs import outcomes

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


def test_dropout_is_reproducible_and_different_on_each_replica():
    assert outcomes()["dropout"] == {"reproducible": True, "different": True, "new": True}


def test_losses_that_a_layer_adds_inside_run_are_refused():
    assert "StrategyError: " in outcomes()["loss in run"]
    assert "outside run, as fit does" in outcomes()["loss in run"]


def test_it_equals_batch_normalization_on_one_device():
    assert outcomes()["normalization"] < 1e-5


def test_its_moments_of_two_examples_differ_by_rounding_alone():
    assert outcomes()["moments"] < 1e-13


def test_it_is_saved_loaded_and_cloned():
    outcome = outcomes()["saved"]
    assert outcome["kinds"] == ["SyncBatchNormalization"] * 2
    assert outcome["difference"] < 1e-6


def test_apply_inside_run_is_one_step():
    outcome = outcomes()["apply in run"]
    assert outcome["iterations"] == [4, 4]
    assert outcome["weights"] < 1e-5


def test_apply_ends_a_step_once_also_if_optimizers_are_wrapped():
    assert outcomes()["ends of steps"] == {"one": [6, 6], "wrapped": [6, 6], "several": [6, 6]}


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


def test_a_keras_model_is_not_left_uncompiled_in_silence():
    assert "CompileError: calls of Sequential cannot be compiled" in outcomes()["compiled"]
    assert "jit_compile" in outcomes()["compiled"]
