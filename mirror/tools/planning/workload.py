"""Workload: the step of one device, from which all others are predicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from mirror.errors import short_repr
from mirror.tools.planning.plan_error import PlanError, not_negative, positive, share, whole

FORWARD_SHARE = 1 / 3
"""Of forward and backward: a backward pass has about twice the operations of its forward pass."""

LAUNCHES_PER_TENSOR = 6
"""What a step launches per parameter, where nothing else is known.

Counted by a ``TorchDispatchMode``, without views, in torch 2.13: 3.5 and 5.8 for an MLP of 18
parameters with SGD and AdamW, 3.0 and 5.0 for 16 bottlenecks of a ResNet, 6.0 and 8.0 for a
transformer of 6 layers.
"""

LAUNCH_SECONDS = 10e-6
"""What the host pays for one operator in eager PyTorch, where nothing else is known.

An assumption: 5 to 25 us are said to be usual on a server ("From PyTorch op to kernel launch",
jiahuanglin.xyz); some 25 us were measured on a shared virtual core. Give ``host_seconds``.
"""

NUM_TENSORS = 100
_FLOAT_BYTES = 4


@dataclass(frozen=True)
class Workload:
    """A step on one device alone.

    Attributes:
        step_seconds: how long it takes.
        batch_size: its examples.
        sizes_bytes: of the gradients as they are sent, in order of registration.
        forward_share: the share of the forward pass in forward and backward.
        update_seconds: of the step, the optimizer's.
        host_seconds: how long the host takes to launch it; at most ``step_seconds``.
        host_is_known: whether that was measured or given, not estimated.
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
        """Of all gradients."""
        return sum(self.sizes_bytes)

    def forward_seconds(self, part: float) -> float:
        """Of a part of the batch, whose forward and backward take that part of the time."""
        return (self.step_seconds - self.update_seconds) * part * self.forward_share

    def backward_seconds(self, part: float) -> float:
        """Of a part of the batch."""
        return (self.step_seconds - self.update_seconds) * part * (1 - self.forward_share)

    def busy_seconds(self, part: float) -> float:
        """Of a step over a part of the batch: of the whole of it, exactly ``step_seconds``."""
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
    """Returns a workload whose numbers go together; what is ``None`` is assumed.

    Raises:
        PlanError: one of them is out of its range, or they contradict each other.
    """
    step = positive("step_seconds", step_seconds)
    update = not_negative("update_seconds", 0.0 if update_seconds is None else update_seconds)
    if update >= step:
        raise PlanError(
            f"update_seconds is part of step_seconds, {step:g}, and below it; got {update:g}"
        )
    if host_seconds is None:
        host = min(step, LAUNCHES_PER_TENSOR * LAUNCH_SECONDS * len(sizes_bytes))
    else:
        host = not_negative("host_seconds", host_seconds)
    if host > step:
        raise PlanError(
            "host_seconds is how long the host takes to launch one step of one device, at most "
            f"step_seconds, {step:g}; got {host:g}"
        )
    return Workload(
        step_seconds=step,
        batch_size=whole("batch_size", batch_size),
        sizes_bytes=sizes_bytes,
        forward_share=share(
            "forward_share", FORWARD_SHARE if forward_share is None else forward_share
        ),
        update_seconds=update,
        host_seconds=host,
        host_is_known=host_seconds is not None,
    )


def sizes_of_model(model: nn.Module, wire_dtype: torch.dtype | None) -> tuple[float, ...]:
    """Returns the bytes of the gradients of a model, in order of registration.

    Raises:
        PlanError: it is no module, or none of its parameters is trained.
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
    """Returns the bytes of gradients of which only the numbers of elements are known.

    Args:
        parameters: of each tensor, in order of registration, or of all together.
        tensors: how many there are, all equal, if only their sum is known.

    Raises:
        PlanError: one of them is no positive whole number, or both say how many there are.
    """
    width = float(wire_dtype.itemsize if wire_dtype else _FLOAT_BYTES)
    if isinstance(parameters, (int, float)):
        number = whole("parameters", parameters)
        count = whole("tensors", NUM_TENSORS if tensors is None else tensors)
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
    return tuple(positive("parameters", number) * width for number in parameters)
