"""The step of one device: measured or given, and checked."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from statistics import mean, median
from time import perf_counter

import torch
from torch import nn

from mirror.devices import is_simulated, synchronize
from mirror.errors import MirrorError, short_repr
from mirror.strategy.strategy_base import Strategy


class PlanError(MirrorError, ValueError):
    """An argument of a plan is no step, no link, or no number of devices."""


def check_number(
    name: str,
    value: object,
    rule: str = "be above 0",
    fits: Callable[[float], bool] = lambda number: number > 0,
) -> float:
    """Returns a finite number that follows a rule, as a float.

    Raises:
        PlanError: it does not; the message has the rule and the value.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise PlanError(f"{name} must be a finite number, got {short_repr(value)}")
    if not fits(value):
        raise PlanError(f"{name} must {rule}, got {short_repr(value)}")
    return float(value)


def check_not_negative(name: str, value: object) -> float:
    """Returns a number of at least 0; raises PlanError for any other value."""
    return check_number(name, value, "not be below 0", lambda number: number >= 0)


def check_plan_count(name: str, value: object) -> int:
    """Returns a whole number of at least 1, of any numeric type; else raises PlanError."""
    rule = "be a whole number of at least 1"
    return int(check_number(name, value, rule, lambda n: n >= 1 and n == int(n)))


def check_plan_choice(name: str, value: object, choices: Collection[str]) -> str:
    """Returns a name that is one of the choices; raises PlanError for any other value."""
    if not isinstance(value, str) or value not in choices:
        raise PlanError(f"{name} must be one of {', '.join(choices)}; got {short_repr(value)}")
    return value


FORWARD_SHARE = 1 / 3
"""The default share of the forward pass: a backward pass has about twice its operations."""

LAUNCHES_PER_TENSOR = 6
"""Operators launched per parameter and step, where nothing else is known.

Counted by a ``TorchDispatchMode``, without views, in torch 2.13: 3.5 and 5.8 for an MLP of 18
parameters with SGD and AdamW, 3.0 and 5.0 for 16 bottlenecks of a ResNet, 6.0 and 8.0 for a
transformer of 6 layers.
"""

LAUNCH_SECONDS = 10e-6
"""The host time of one operator in eager PyTorch, where nothing else is known.

An assumption: 5 to 25 us are said to be usual on a server ("From PyTorch op to kernel launch",
jiahuanglin.xyz); some 25 us were measured on a shared virtual core. Give ``host_seconds``.
"""

NUM_TENSORS = 100
_FLOAT_BYTES = 4


@dataclass(frozen=True)
class Workload:
    """A step on one device alone.

    Attributes:
        step_seconds: the time of the step.
        batch_size: its examples.
        sizes_bytes: the bytes of each gradient as it is sent, in order of registration.
        forward_share: the share of the forward pass in forward and backward.
        update_seconds: the part of the step that the optimizer takes.
        host_seconds: the time in which the host launches it; at most ``step_seconds``.
        host_is_known: whether ``host_seconds`` was measured or given, not estimated.
    """

    step_seconds: float
    batch_size: int
    sizes_bytes: tuple[float, ...]
    forward_share: float
    update_seconds: float
    host_seconds: float
    host_is_known: bool

    @property
    def num_bytes(self) -> float:
        """The bytes of all gradients."""
        return sum(self.sizes_bytes)

    def backward_seconds(self, part: float) -> float:
        """The backward pass of a part of the batch, in proportion."""
        return (self.step_seconds - self.update_seconds) * part * (1 - self.forward_share)

    def busy_seconds(self, part: float) -> float:
        """The step of a part of the batch; exactly ``step_seconds`` for the whole batch."""
        return self.step_seconds - (self.step_seconds - self.update_seconds) * (1 - part)


def make_workload(
    *,
    step_seconds: float,
    batch_size: int,
    sizes_bytes: tuple[float, ...],
    forward_share: float | None = None,
    update_seconds: float | None = None,
    host_seconds: float | None = None,
) -> Workload:
    """Returns a consistent workload; numbers that are ``None`` are assumed.

    Raises:
        PlanError: a number is out of its range, or two numbers contradict each other.
    """
    step = check_number("step_seconds", step_seconds)
    update = check_not_negative(
        "update_seconds", 0.0 if update_seconds is None else update_seconds
    )
    if update >= step:
        raise PlanError(
            f"update_seconds is part of step_seconds, {step:g}, and below it; got {update:g}"
        )
    if host_seconds is None:
        host = min(step, LAUNCHES_PER_TENSOR * LAUNCH_SECONDS * len(sizes_bytes))
    else:
        host = check_not_negative("host_seconds", host_seconds)
    if host > step:
        raise PlanError(
            "host_seconds is how long the host takes to launch one step of one device, at most "
            f"step_seconds, {step:g}; got {host:g}"
        )
    return Workload(
        step_seconds=step,
        batch_size=check_plan_count("batch_size", batch_size),
        sizes_bytes=sizes_bytes,
        forward_share=check_number(
            "forward_share",
            FORWARD_SHARE if forward_share is None else forward_share,
            "be a share from 0 to 1",
            lambda number: 0 <= number <= 1,
        ),
        update_seconds=update,
        host_seconds=host,
        host_is_known=host_seconds is not None,
    )


def sizes_of_model(model: nn.Module, wire_dtype: torch.dtype | None) -> tuple[float, ...]:
    """Returns the bytes of the gradients of a model, in order of registration.

    Raises:
        PlanError: it is not a module, or has no trained parameter.
    """
    if not isinstance(model, nn.Module):
        raise PlanError(f"model must be a torch.nn.Module, got {short_repr(model)}")
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        raise PlanError("model has no parameter that requires a gradient: nothing is reduced")
    return tuple(p.numel() * float((wire_dtype or p.dtype).itemsize) for p in trained)


def sizes_of_numbers(
    parameters: float | Sequence[float], tensors: int | None, wire_dtype: torch.dtype | None
) -> tuple[float, ...]:
    """Returns the bytes of gradients from numbers of elements.

    Args:
        parameters: the elements of each tensor, in order of registration, or of all together.
        tensors: the number of equal tensors, if ``parameters`` is a sum.

    Raises:
        PlanError: one is not a positive whole number, or both give a number of tensors.
    """
    width = float(wire_dtype.itemsize if wire_dtype else _FLOAT_BYTES)
    if isinstance(parameters, (int, float)):
        number = check_plan_count("parameters", parameters)
        count = check_plan_count("tensors", NUM_TENSORS if tensors is None else tensors)
        if count > number:
            raise PlanError(
                f"{number} parameters cannot be in {count} tensors; "
                f"pass tensors=, at most {number}"
            )
        return (number / count * width,) * count
    if tensors is not None:
        raise PlanError(
            f"parameters are listed one by one: leave out tensors={short_repr(tensors)}"
        )
    if not isinstance(parameters, (list, tuple)) or not parameters:
        raise PlanError(
            "parameters must be a number of elements, or a list with one for each tensor; "
            f"got {short_repr(parameters)}"
        )
    return tuple(check_number("parameters", number) * width for number in parameters)


_WARM_UP = 3
_MIN_STEPS = 5
_MAX_STEPS = 30
_ENOUGH_SECONDS = 0.5


@dataclass(frozen=True)
class Measured:
    """The known times of a step; ``None``: not measured.

    Attributes:
        step_seconds: the step of one device alone, without waiting for input.
        host_seconds: the time in which the host launches it.
        forward_share: the share of the forward pass in forward and backward.
        update_seconds: the time of the optimizer, and of other work that a step does once.
    """

    step_seconds: float
    host_seconds: float | None = None
    forward_share: float | None = None
    update_seconds: float | None = None


OPTIMIZER_STATES = ("replicated", "sharded")


def optimizer_state_of(measured: object) -> str:
    """Returns how a measured strategy keeps optimizer state; "replicated" without a strategy."""
    return measured.report().optimizer_state if isinstance(measured, Strategy) else "replicated"


def measure(
    measured: Strategy | Callable[[], object] | None,
    model: nn.Module | None,
    step_seconds: float | None,
) -> Measured:
    """Returns the step of a strategy, of a function that runs one, or the given step.

    Raises:
        PlanError: neither or both are given, or ``measured`` cannot be measured.
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
        return measure_strategy(measured)
    if not callable(measured):
        raise PlanError(
            "what is measured is a strategy, or a function that takes a step; "
            f"got {short_repr(measured)}"
        )
    devices = {p.device for p in model.parameters()} if model is not None else set()
    return measure_calls(measured, devices)


def measure_strategy(strategy: Strategy) -> Measured:
    """Returns the step of one of a strategy's devices, from the report of its last steps.

    Simulated devices share the CPU, which runs the passes of all of them, but one update. There
    the time of the launches is not known.

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
    if not report.forward:  # a call outside run with one replica is plain PyTorch
        return Measured(seconds, update_seconds=report.optimizer)
    return Measured(seconds, forward_share=report.forward / passes, update_seconds=once)


def measure_calls(step: Callable[[], object], devices: Iterable[torch.device]) -> Measured:
    """Calls a function that runs one step, several times; returns the median step.

    Args:
        step: runs a step on one device.
        devices: the devices that it uses; on GPUs the launch ends when ``step`` returns.
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
