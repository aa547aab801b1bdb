"""Forks: what a forked process makes anew, because threads of the other one have it.

A forked process has a copy of everything but the threads: who waits there for one of them waits
for ever, be it for a replica's turn or for a lock that was taken at that moment.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class ReinitAfterFork(Protocol):
    """Who has threads, or locks."""

    def after_fork(self) -> None:
        """Makes them anew, or forgets them."""


_renewed: weakref.WeakSet[ReinitAfterFork] = weakref.WeakSet()


def reinit_after_fork(owner: ReinitAfterFork) -> None:
    """Has an owner renewed in every forked process, if it still lives."""
    _renewed.add(owner)


def _after_fork() -> None:
    for owner in tuple(_renewed):
        owner.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
