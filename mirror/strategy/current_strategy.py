"""Access to the current strategy and replica, for library code."""

from __future__ import annotations

from functools import cache

from mirror.devices import resolve
from mirror.execution.current_replica import current
from mirror.strategy.mirrored import MirroredStrategy
from mirror.strategy.replica_context import ReplicaContext


def get_strategy() -> MirroredStrategy:
    """Returns the strategy of the current scope or replica, else a default of one replica."""
    strategy: MirroredStrategy | None = current.strategy
    return _default_strategy() if strategy is None else strategy


def has_strategy() -> bool:
    """Returns whether a strategy other than the default is current."""
    return current.strategy is not None


def in_cross_replica_context() -> bool:
    """Returns whether a strategy is current, but none of its replicas."""
    return current.strategy is not None and current.replica is None


def get_replica_context() -> ReplicaContext | None:
    """Returns the current replica's context; ``None`` in a cross-replica context.

    Without a strategy it is the context of a default strategy of one replica.
    """
    if current.strategy is None:
        return _default_strategy().context_of(None)
    replica = current.replica
    if replica is None:
        return None
    if replica.context is None:
        strategy: MirroredStrategy = replica.replicas.strategy
        replica.context = strategy.context_of(replica)
    context: ReplicaContext = replica.context
    return context


@cache
def _default_strategy() -> MirroredStrategy:
    return MirroredStrategy(resolve(None)[:1])
