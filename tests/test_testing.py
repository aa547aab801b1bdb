"""``mirror.testing``: the check of ``mirror check``, for a function in a test."""

import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mirror
from mirror.testing import (
    SimulatedDeviceNames,
    assert_equal_to_one_device,
    compare_with_one_device,
)


def program(layer=nn.ReLU, steps=3, on_step=lambda step: None):
    """Returns a function that builds and trains a small model."""

    def train():
        model = nn.Sequential(nn.Linear(4, 6), layer(), nn.Linear(6, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for step in range(steps):
            loss = F.cross_entropy(model(torch.randn(7, 4)), torch.randint(2, (7,)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            on_step(step)

    return train


def test_a_program_that_trains_as_on_one_device_passes():
    assert_equal_to_one_device(program())
    result = compare_with_one_device(program(), 3)
    assert (result.exit_code, result.steps, result.replicas) == (0, 3, 3)
    assert result.largest_difference < 1e-5


def test_an_assertion_error_names_module_cause_and_remedy():
    with pytest.raises(AssertionError, match=r"^2 replicas, different: from step 1 on") as raised:
        assert_equal_to_one_device(program(lambda: nn.BatchNorm1d(6)))
    message = str(raised.value)
    assert "module    model.1 (BatchNorm1d)" in message
    assert "convert_sync_batchnorm" in message


def test_one_replica_equals_one_device_with_batch_norm():
    assert_equal_to_one_device(program(lambda: nn.BatchNorm1d(6)), replicas=1)


def test_a_result_says_whether_the_strategy_warns():
    assert compare_with_one_device(program(lambda: nn.BatchNorm1d(6))).reported
    assert not compare_with_one_device(program(nn.Dropout)).reported


def test_dropout_differs_unless_it_is_switched_off():
    assert compare_with_one_device(program(nn.Dropout)).cause == "random numbers"
    assert_equal_to_one_device(program(nn.Dropout), 2, no_dropout=True)


def test_a_program_can_run_in_double_precision():
    dtypes = set()
    build = program(on_step=lambda step: dtypes.add(torch.get_default_dtype()))
    result = compare_with_one_device(build, double=True)
    assert (result.dtype, dtypes) == ("float64", {torch.float64})
    assert result.largest_difference < 1e-12
    assert torch.get_default_dtype() == torch.float32


def test_a_program_is_ended_after_the_given_steps():
    seen = []
    assert compare_with_one_device(program(steps=9, on_step=seen.append), steps=2).steps == 2
    assert max(seen) == 0  # step() does not return from the last one


def test_an_error_on_one_device_is_raised():
    def fail(step):
        raise KeyError("no data")

    with pytest.raises(KeyError, match="no data"):
        assert_equal_to_one_device(program(on_step=fail))


def test_an_error_on_replicas_alone_is_a_difference():
    def fail(step):
        if mirror.get_strategy().num_replicas_in_sync > 1:
            raise KeyError("no data")

    with pytest.raises(AssertionError, match="on 2 replicas raises KeyError in step 2"):
        assert_equal_to_one_device(program(on_step=fail))


def test_a_program_without_a_step_cannot_be_compared():
    with pytest.raises(AssertionError, match="the program takes no optimizer step"):
        assert_equal_to_one_device(lambda: None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"replicas": 0}, "replicas must be at least 1"),
        ({"replicas": ()}, "replicas must be at least 1"),
        ({"steps": 0}, "steps must be at least 1"),
        ({"tolerance": -1.0}, "tolerance is 'auto' or a number above 0"),
        ({"tolerance": "tight"}, "tolerance is 'auto' or a number above 0"),
    ],
)
def test_wrong_arguments_are_value_errors(options, message):
    with pytest.raises(ValueError, match=message):
        assert_equal_to_one_device(program(), **options)


def test_a_given_tolerance_decides():
    norm = program(lambda: nn.BatchNorm1d(6))
    assert_equal_to_one_device(norm, 2, tolerance=1e3)
    assert compare_with_one_device(program(), tolerance=1e-12).exit_code == 1


def test_generators_and_torch_are_left_as_they_were():
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    call, backward = nn.Module.__call__, torch.autograd.backward
    compare_with_one_device(program())
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    assert before[:2] == after[:2]
    assert torch.equal(before[2], after[2])
    assert (nn.Module.__call__, torch.autograd.backward) == (call, backward)
    assert not mirror.has_strategy()


def test_simulated_devices_are_names_for_a_strategy():
    assert SimulatedDeviceNames() == ("cpu", "cpu")
    assert SimulatedDeviceNames()(3) == ("cpu",) * 3
    with mirror.MirroredStrategy(SimulatedDeviceNames(4)) as strategy:
        assert strategy.num_replicas_in_sync == 4
    with pytest.raises(ValueError, match="at least 1, got 0"):
        SimulatedDeviceNames(0)


def test_the_plug_in_brings_the_fixture_and_does_not_import_torch(tmp_path):
    (tmp_path / "test_it.py").write_text(
        "import sys\n\n\n"
        "def test_early():\n    assert 'torch' not in sys.modules\n\n\n"
        "def test_it(simulated_devices):\n    assert simulated_devices(3) == ('cpu',) * 3\n"
    )
    root = str(Path(__file__).parents[1])
    words = [sys.executable, "-m", "pytest", "-q", "-p", "mirror_pytest", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*words, "test_it.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": root},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert "2 passed" in done.stdout
