"""Reinitialization after a fork, of objects with threads or locks.

A forked process has a copy of everything except the threads. A wait for one of them never ends:
for a replica's turn, or for a lock that a thread held at the moment of the fork.
"""

from __future__ import annotations

import os
from typing import Protocol

from mirror.base.weak_registry import WeakRegistry


class ReinitAfterFork(Protocol):
    """An object with threads or locks."""

    def after_fork(self) -> None:
        """Creates the threads and locks again, or drops them."""


_owners: WeakRegistry[ReinitAfterFork] = WeakRegistry()


def reinit_after_fork(owner: ReinitAfterFork) -> None:
    """Registers an object for ``after_fork`` in every forked process; holds it weakly."""
    _owners.add(owner)


def _after_fork() -> None:
    for owner in _owners:
        owner.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
