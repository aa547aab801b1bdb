"""Measuring how long each replica computes, for splitting batches over unlike devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from mirror.devices import Stopwatch

if TYPE_CHECKING:
    from mirror.replica.group import ReplicaGroup


def measure(group: ReplicaGroup) -> Callable[[], tuple[float, ...]]:
    """Begins to measure; returns what gives the seconds each replica has computed in runs.

    Waiting for the other replicas at merge points does not count, nor does what the caller does
    between runs. Without a call of this, runs measure nothing.
    """
    if not group.stopwatches:
        group.stopwatches = tuple(map(Stopwatch, group.devices))
    return lambda: tuple(watch.seconds() for watch in group.stopwatches)
