"""The current strategy and replica, and whether objects are mirrored, for library code."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from mirror.devices import resolve
from mirror.errors import StrategyError, short_repr
from mirror.execution.replicas import current
from mirror.replica.modules.module_owner import ReplicaDict
from mirror.replica.params.mirrored_buffer import AGGREGATIONS, MirroredBuffer
from mirror.strategy.group import all_groups
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


def is_mirrored(obj: object) -> bool:
    """Returns whether a module, parameter, buffer or optimizer is mirrored by a strategy.

    A module is mirrored if one of its own or its submodules' variables is; an optimizer if one of
    its parameters is.
    """
    if isinstance(obj, nn.Module):
        return any(map(is_mirrored, (*obj.parameters(), *obj.buffers())))
    if isinstance(obj, Optimizer):
        return any(is_mirrored(p) for options in obj.param_groups for p in options["params"])
    if not isinstance(obj, Tensor):
        return False
    for group in all_groups():
        group.modules.mirror_recorded()
        if group.registry.owns(obj):
            return True
    return False


def set_aggregation(module: nn.Module, buffer_name: str, how: str) -> None:
    """Sets how a mirrored buffer's copies combine when read in the cross-replica context.

    It has no effect with one replica.

    Args:
        how: ``"mean"``; ``"sum"``, where writing ``x`` in the cross-replica context sets the first
            replica's copy to ``x`` and the rest to zero; ``"first"``; ``"none"``, where reading
            raises StrategyError.

    Raises:
        ValueError: ``how`` is unknown.
        AttributeError: the module has no such buffer.
        StrategyError: the buffer is not mirrored.
    """
    if not isinstance(how, str) or how not in AGGREGATIONS:
        names = ", ".join(AGGREGATIONS)
        raise ValueError(f"aggregation must be one of {names}, got {short_repr(how)}")
    buffers: dict[str, Any] = module._buffers
    if buffers.get(buffer_name) is None:
        raise AttributeError(f"{type(module).__name__} has no buffer {buffer_name!r}")
    if not is_mirrored(dict.__getitem__(buffers, buffer_name)):
        raise StrategyError(
            f"buffer {buffer_name!r} is not mirrored; create the module in strategy.scope() or "
            "pass it to strategy.mirror first"
        )
    buffer = dict.__getitem__(buffers, buffer_name)
    if isinstance(buffer, MirroredBuffer) and isinstance(buffers, ReplicaDict):
        buffer._mirrored.aggregation = buffers.aggregations[buffer_name] = how
