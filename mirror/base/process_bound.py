"""Objects that belong to one process: they are reinitialized after a fork, and never copied.

A forked process has a copy of everything except the threads. A wait for one of them never ends:
for a replica's turn, or for a lock that a thread held at the moment of the fork. So the owners of
threads and locks register here. ``WeakRegistry`` holds them, and others, without keeping them
alive.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from functools import partial
from typing import ClassVar, Generic, NoReturn, Protocol, TypeVar

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


class ReinitAfterFork(Protocol):
    """An object with threads or locks."""

    def after_fork(self) -> None:
        """Creates the threads and locks again, or drops them."""


_owners: WeakRegistry[ReinitAfterFork] = WeakRegistry()


def reinit_after_fork(owner: ReinitAfterFork) -> None:
    """Registers an object for ``after_fork`` in every forked process; holds it weakly."""
    _owners.add(owner)


def _reinit_owners() -> None:
    for owner in _owners:
        owner.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reinit_owners)


class NoCopy:
    """Raises TypeError in ``copy.copy``, ``copy.deepcopy`` and ``pickle``, with the alternative.

    Threads, devices and streams cannot be copied, and a partial copy would share them.
    """

    __slots__ = ()
    _instead: ClassVar[str]

    def __reduce__(self) -> NoReturn:  # the copy module calls it, too
        raise TypeError(
            f"a {type(self).__name__} belongs to the process that made it and can be neither "
            f"copied nor pickled; {self._instead}"
        )
