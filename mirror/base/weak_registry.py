"""WeakRegistry: objects by weak reference, which threads may add while others iterate.

``weakref.WeakSet`` raises "Set changed size during iteration" then, on every interpreter.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from functools import partial
from typing import Generic, TypeVar

T = TypeVar("T")


class WeakRegistry(Generic[T]):
    """A set of objects, by identity and in the order of their addition; holds them weakly."""

    def __init__(self) -> None:
        # Each use of the dict is one atomic operation, also without the GIL.
        self._references: dict[int, weakref.ref[T]] = {}

    def add(self, member: T) -> None:
        """Adds an object, for as long as it lives."""
        key = id(member)  # not in use again before the callback has been called
        self._references[key] = weakref.ref(member, partial(self._forget, key))

    def discard(self, member: T) -> None:
        """Removes an object, if it is there."""
        self._references.pop(id(member), None)

    def __bool__(self) -> bool:
        return bool(self._references)

    def __iter__(self) -> Iterator[T]:
        """Yields the objects of the moment of the call that are still alive."""
        for reference in self._references.copy().values():
            member = reference()
            if member is not None:
                yield member

    def _forget(self, key: int, _: object) -> None:
        self._references.pop(key, None)
