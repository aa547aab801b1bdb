"""The signature of a module's call: all that a trace takes for granted of the arguments."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mirror.compiler.free_variables import PLAIN


def sign_call(mode: tuple[bool, bool], args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
    """Returns the signature of a call, and adds its tensors; ``None`` if none can be traced."""
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


_VALUES = set(PLAIN)
