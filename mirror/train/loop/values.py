"""What a training logs: numbers, which may be on a GPU still."""

from __future__ import annotations

import numbers

import torch
from torch import Tensor

from mirror.errors import short_repr
from mirror.strategy.kinds.parameter_server import ParameterServerStrategy
from mirror.strategy.mirrored import MirroredStrategy
from mirror.values import PerReplica

Value = float | Tensor
AnyStrategy = MirroredStrategy | ParameterServerStrategy


def as_value(strategy: AnyStrategy, name: str, value: object) -> Value:
    """Returns a number, or a tensor of one element that nobody changes any more.

    Args:
        name: for messages.

    Raises:
        TypeError: it is none.
    """
    if isinstance(value, PerReplica) and isinstance(strategy, MirroredStrategy):
        value = strategy.reduce("mean", value)
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        with torch.no_grad():
            return value.detach().clone()
    if isinstance(value, numbers.Real):
        return float(value)
    raise TypeError(
        f"log() takes numbers, tensors of one element, {_kinds(strategy)}; {name!r} is "
        f"{short_repr(value)}; log its mean, or several of its numbers under names of their own"
    )


def _kinds(strategy: AnyStrategy) -> str:
    if isinstance(strategy, ParameterServerStrategy):
        return "and RemoteValues of these"
    return "and values per replica"
