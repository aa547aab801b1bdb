"""Reinitialization after a fork, of objects with threads or locks.

A forked process has a copy of everything except the threads. A wait for one of them never ends:
for a replica's turn, or for a lock that a thread held at the moment of the fork.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class ReinitAfterFork(Protocol):
    """An object with threads or locks."""

    def after_fork(self) -> None:
        """Creates the threads and locks again, or drops them."""


_owners: weakref.WeakSet[ReinitAfterFork] = weakref.WeakSet()


def reinit_after_fork(owner: ReinitAfterFork) -> None:
    """Registers an object for ``after_fork`` in every forked process; holds it weakly."""
    _owners.add(owner)


def _after_fork() -> None:
    for owner in tuple(_owners):
        owner.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
