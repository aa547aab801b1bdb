"""Measured steps: a strategy's by its report, a function's by the clock."""

import types

import pytest
import torch
from torch import nn

from mirror.tools.planning import measured_step
from mirror.tools.planning.measured_step import measure, of_calls, of_strategy
from mirror.tools.planning.plan_error import PlanError
from tests.toy_models import ONES, mirrored_layer, sgd

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)


def reported(devices, **changes):
    """A strategy whose report has 8 seconds of input and reduction in a step of 21."""
    times = {
        "num_steps": 3,
        "num_replicas": len(devices),
        "step": 21.0,
        "waiting_for_input": 5.0,
        "waiting_for_reduction": 3.0,
        "forward": 2.0,
        "backward": 6.0,
        "optimizer": 4.0,
        "other": 1.0,
        "host_seconds": (1.0, 3.0),
    }
    report = types.SimpleNamespace(**(times | changes))
    return types.SimpleNamespace(devices=devices, report=lambda: report)


def test_of_simulated_devices_each_has_its_part_of_the_passes_and_the_whole_update():
    seen = of_strategy(reported([CPU, CPU]))
    assert seen.step_seconds == (2 + 6) / 2 + 4 + 1
    assert seen.forward_share == 0.25
    assert seen.update_seconds == 4 + 1
    assert seen.host_seconds is None


def test_a_forward_pass_that_was_not_seen_is_no_update():
    seen = of_strategy(reported([CPU], num_replicas=1, forward=0.0))
    assert (seen.step_seconds, seen.forward_share, seen.update_seconds) == (11, None, 4)


def test_gpus_work_at_once_and_their_replicas_times_are_the_hosts():
    seen = of_strategy(reported([GPU, GPU]))
    assert seen.step_seconds == 13
    assert seen.host_seconds == 2
    assert (seen.forward_share, seen.update_seconds) == (None, None)


def test_a_strategy_that_has_not_stepped_is_refused(make_strategy):
    with pytest.raises(PlanError, match="has not taken a step"):
        measure(make_strategy(2), None, None)


def test_a_strategys_steps_are_measured(make_strategy):
    strategy = make_strategy(2)
    layer = mirrored_layer(strategy)
    optimizer = sgd(layer)
    for _ in range(3):
        layer(ONES).mean().backward()
        optimizer.step()
    seen = measure(strategy, None, None)
    assert 0 < seen.step_seconds <= strategy.report().step
    assert seen.update_seconds is not None
    assert 0 < seen.update_seconds < seen.step_seconds


class Clock:
    """A clock that a step puts on."""

    def __init__(self, monkeypatch, seconds):
        self.now = 0.0
        self.calls = 0
        self.seconds = seconds
        monkeypatch.setattr(measured_step, "perf_counter", lambda: self.now)

    def step(self):
        self.calls += 1
        self.now += self.seconds


@pytest.mark.parametrize(("seconds", "calls"), [(10.0, 3 + 5), (0.05, 3 + 10), (1e-6, 3 + 30)])
def test_a_function_is_called_until_enough_is_seen(monkeypatch, seconds, calls):
    clock = Clock(monkeypatch, seconds)
    assert of_calls(clock.step, [CPU]).step_seconds == pytest.approx(seconds)
    assert clock.calls in (calls, calls + 1)  # ten times 0.05 may be less than a half


def test_on_a_gpu_the_host_is_done_when_the_function_returns(monkeypatch):
    clock = Clock(monkeypatch, 0.25)
    waits = []

    def synchronize(device):
        waits.append(device)
        clock.now += 0.75

    monkeypatch.setattr(measured_step, "synchronize", synchronize)
    seen = of_calls(clock.step, [GPU])
    assert (seen.step_seconds, seen.host_seconds) == (1, 0.25)
    assert set(waits) == {GPU}


def test_a_function_of_a_model_on_the_cpu_does_not_tell_the_hosts_time():
    model = nn.Linear(2, 2)
    seen = measure(lambda: model(torch.ones(1, 2)), model, None)
    assert seen.step_seconds > 0
    assert seen.host_seconds is None


@pytest.mark.parametrize(
    ("what", "seconds", "message"),
    [
        (None, None, "pass either what is to be measured"),
        (print, 0.1, "pass either what is to be measured"),
        ("fast", None, "a function that takes a step; got 'fast'"),
    ],
)
def test_what_cannot_be_measured_is_refused(what, seconds, message):
    with pytest.raises(PlanError, match=message):
        measure(what, None, seconds)
