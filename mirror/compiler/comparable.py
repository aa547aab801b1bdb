"""Comparable: plain values, which are compared as they are, and objects, by identity.

What a trace may find missing, and a step that runs uncompiled makes.
"""

from __future__ import annotations

from typing import Any

import torch

PLAIN = (bool, int, float, str, bytes, complex, type(None), torch.dtype, torch.device)


class SameObject:
    """An object, to be compared by identity; it is kept alive, so its ``id`` is its own."""

    __slots__ = ("is_then", "what")

    def __init__(self, what: Any) -> None:
        self.what, self.is_then = what, True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SameObject) and self.what is other.what

    __hash__ = None  # type: ignore[assignment]


def comparable(value: Any) -> Any:
    """Returns a plain value, or what compares an object by identity."""
    if isinstance(value, PLAIN):
        return value
    if type(value) is tuple and all(isinstance(entry, PLAIN) for entry in value):
        return value
    return SameObject(value)


class ProgramFailed(Exception):
    """A compiled program has raised an error, which is the cause.

    Attributes:
        has_changed: whether the step may have changed parameters, state or buffers.
    """

    def __init__(self, *, has_changed: bool) -> None:
        super().__init__(has_changed)
        self.has_changed = has_changed


class RunsUncompiled(Exception):
    """A step must run uncompiled with arguments of these sizes, because it checks a value then."""


class StateMissing(Exception):
    """A step makes optimizer state that was not there; what is there when it runs uncompiled."""
