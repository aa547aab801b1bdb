"""Measured: a step of one device as it was seen here."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import mean, median
from time import perf_counter

import torch
from torch import nn

from mirror.devices import is_simulated, synchronize
from mirror.errors import short_repr
from mirror.strategy.strategy_base import Strategy
from mirror.tools.planning.plan_error import PlanError

_WARM_UP = 3
_MIN_STEPS = 5
_MAX_STEPS = 30
_ENOUGH_SECONDS = 0.5


@dataclass(frozen=True)
class Measured:
    """What is known of a step; ``None``: not seen.

    Attributes:
        step_seconds: of one device alone, without waiting for input.
        host_seconds: how long the host takes to launch it.
        forward_share: the share of the forward pass in forward and backward.
        update_seconds: of the optimizer, and of what else a step does once.
    """

    step_seconds: float
    host_seconds: float | None = None
    forward_share: float | None = None
    update_seconds: float | None = None


def measure(
    measured: Strategy | Callable[[], object] | None,
    model: nn.Module | None,
    step_seconds: float | None,
) -> Measured:
    """Returns a step: of a strategy, of a function that takes one, or as it is given.

    Raises:
        PlanError: neither or both are there, or what is there cannot be measured.
    """
    if (measured is None) == (step_seconds is None):
        raise PlanError(
            "pass either what is to be measured (a strategy that has taken steps, or a function "
            "that takes one), or step_seconds="
        )
    if measured is None:
        assert step_seconds is not None
        return Measured(step_seconds)
    if isinstance(measured, Strategy):
        return of_strategy(measured)
    if not callable(measured):
        raise PlanError(
            "what is measured is a strategy, or a function that takes a step; "
            f"got {short_repr(measured)}"
        )
    devices = {p.device for p in model.parameters()} if model is not None else set()
    return of_calls(measured, devices)


def of_strategy(strategy: Strategy) -> Measured:
    """Returns the step of one of a strategy's devices, from the report of its last steps.

    Simulated devices share the CPU, which makes all their passes but one update; and what the host
    takes to launch cannot be told from what the step takes.

    Raises:
        PlanError: the strategy has not taken a step.
    """
    report = strategy.report()
    if report.num_steps == 0:
        raise PlanError("the strategy has not taken a step; take some, and plan then")
    if not is_simulated(strategy.devices):
        seconds = report.step - report.waiting_for_input - report.waiting_for_reduction
        return Measured(seconds, min(seconds, mean(report.host_seconds)))
    passes = report.forward + report.backward
    once = report.optimizer + report.other
    seconds = passes / report.num_replicas + once
    if not report.forward:  # that of one replica, called outside run, is the program's own code
        return Measured(seconds, update_seconds=report.optimizer)
    return Measured(seconds, forward_share=report.forward / passes, update_seconds=once)


def of_calls(step: Callable[[], object], devices: Iterable[torch.device]) -> Measured:
    """Calls a function that takes one step, some times; returns the median step.

    Args:
        step: takes a step on one device.
        devices: on which it works; on GPUs the host's time is that until ``step`` returns.
    """
    places = tuple(devices)

    def wait() -> None:
        for device in places:
            synchronize(device)

    for _ in range(_WARM_UP):
        step()
    wait()
    steps: list[float] = []
    hosts: list[float] = []
    while len(steps) < _MIN_STEPS or (sum(steps) < _ENOUGH_SECONDS and len(steps) < _MAX_STEPS):
        begin = perf_counter()
        step()
        hosts.append(perf_counter() - begin)
        wait()
        steps.append(perf_counter() - begin)
    if is_simulated(places):
        return Measured(median(steps))
    return Measured(median(steps), min(median(steps), median(hosts)))
