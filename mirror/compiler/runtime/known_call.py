"""KnownCall: a call of a compiled module by its signature, the code it has run, and its programs.

A signature is all that a trace takes for granted of the arguments: their structure, sizes,
strides, dtypes and plain values. What else it takes for granted is guarded. See
[Note: Assumptions].

A trace must run no code that no call has run: what that changes in Python would happen once more,
and what it reads, such as a clock, could not be found in a trace. So each observation has guards
of all values that its call has left. Where they hold, the next call runs the same code.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mirror.compiler.free_variables import PLAIN

_MAX_OBSERVATIONS = 4
_VALUES = set(PLAIN)


class KnownCall:
    """A call by its signature.

    Attributes:
        pattern: the arguments and the gradients of the first call.
        programs: the guards and programs of its traces, the last one that was valid first.
        is_pending: whether it waits for a trace.
        is_unseen: whether the next call is to be observed.
        num_misses: how often in a row no observation was one of the values to be traced.
    """

    __slots__ = ("is_pending", "is_unseen", "num_misses", "observations", "pattern", "programs")

    def __init__(self, pattern: Any) -> None:
        self.pattern = pattern
        self.programs: list[tuple[Any, Any]] = []
        self.observations: list[tuple[Any, Any]] = []
        self.is_pending, self.is_unseen = False, True
        self.num_misses = 0

    def find_valid(self) -> Any:
        """Returns the program whose guards hold, if there is one."""
        return _find(self.programs)

    def add_observation(self, values: Any, observed: Any) -> None:
        """Adds the code that a call has run, and guards of the values that it has left."""
        self.observations.insert(0, (values, observed))
        del self.observations[_MAX_OBSERVATIONS:]

    def find_observation(self) -> Any:
        """Returns the code that a call with the values of now has run, if there was one."""
        if not self.observations:
            return None
        with self.pattern.in_its_modes():
            return _find(self.observations)

    def last_observation(self) -> Any:
        """Returns the code that the last observed call has run."""
        return self.observations[0][1]

    def find_change(self) -> str | None:
        """Returns in words what is not as in the last observed call."""
        with self.pattern.in_its_modes():
            found: str | None = self.observations[0][0].find_change()
            return found


def _find(guarded: list[tuple[Any, Any]]) -> Any:
    """Returns the first entry whose guards hold, and moves it to the front."""
    for i, (guards, found) in enumerate(guarded):
        if guards.hold():
            if i:
                guarded.insert(0, guarded.pop(i))
            return found
    return None


def sign_call(mode: tuple[bool, bool], args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
    """Returns the signature of a call, and adds its tensors; ``None`` if it cannot be traced."""
    key: list[Any] = [mode]
    for value in args:
        if type(value) is Tensor and value.layout is torch.strided and not value.is_inference():
            tensors.append(value)
            key += (
                *(value.shape, value.stride(), value.dtype, value.device.type),
                value.requires_grad,
            )
        elif not _describe(value, key, tensors):
            return None
    if kwargs and not _describe(kwargs, key, tensors):
        return None
    return tuple(key)


def _describe(value: Any, key: list[Any], tensors: list[Tensor]) -> bool:
    """Adds a value to a signature; returns False if a trace cannot take it for granted."""
    kind = type(value)
    if kind is Tensor:
        if value.layout is not torch.strided or value.is_inference():
            return False
        tensors.append(value)
        key += (
            *(value.shape, value.stride(), value.dtype, value.device.type),
            value.requires_grad,
        )
        return True
    if kind is tuple or kind is list:
        key += (kind, len(value))
        return all(_describe(one, key, tensors) for one in value)
    if kind is dict:
        key += (kind, *value)
        return all(_describe(one, key, tensors) for one in value.values())
    if kind in _VALUES:
        key += (kind, value)
        return True
    return False
