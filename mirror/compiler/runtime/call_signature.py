"""The signature of a module's call: all that a trace takes for granted of the arguments.

Arguments are tensors, plain values, and lists, tuples, dicts and dataclasses of these. What other
objects hold could change unseen.
"""

from __future__ import annotations

from collections import OrderedDict, UserDict
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mirror.compiler.free_variables import PLAIN
from mirror.values import children_of, leaves_of


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
    children = children_of(value) if _is_structure(value) else None
    if children is None:
        return False
    key += (kind, *children)
    return all(_describe(one, key, tensors) for one in children.values())


def _is_structure(value: Any) -> bool:
    """Whether the entries of a value are all that code can read of it."""
    kind = type(value)
    if kind in (OrderedDict, UserDict) or (isinstance(value, tuple) and hasattr(kind, "_fields")):
        return True
    return is_dataclass(kind) and not isinstance(value, nn.Module)


def find_opaque(args: Any, kwargs: Any) -> str | None:
    """Returns in words the argument for which a call has no signature.

    ``None``: it is a tensor of inference mode.
    """
    for name, value in [*enumerate(args), *kwargs.items()]:
        if _describe(value, [], []):
            continue
        where = f"argument {name!r}"
        if not isinstance(value, Tensor) and not _is_leaf(value):
            where += f", a {type(value).__name__}, holds"
            value = next((leaf for leaf in leaves_of(value) if not _describe(leaf, [], [])), value)
        else:
            where += " is"
        if isinstance(value, Tensor) and value.is_inference():
            return None
        if type(value) is Tensor:
            return f"{where} a tensor with the layout {str(value.layout).removeprefix('torch.')}"
        return (
            f"{where} a {type(value).__name__}, of which a program could keep an old state; pass "
            "tensors, numbers, strings, and lists, dicts or dataclasses of them"
        )
    return None


def _is_leaf(value: Any) -> bool:
    return [*leaves_of(value)] == [value]


_VALUES = {*PLAIN, torch.Size}
