"""Copies and pickles of a module that a replica makes contain the replica's own attributes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from mirror.base.torch_private import wrap_once
from mirror.execution.current_replica import current
from mirror.replica.modules.call_interceptor import interceptor_of
from mirror.replica.modules.per_replica_values import MISSING
from mirror.replica.modules.replica_attributes import is_own, own_values
from mirror.replica.modules.split_call import CallInterceptor


def watch_copies() -> None:
    """Makes ``copy`` and ``pickle`` see the replica's values of attributes; once, permanently."""
    wrap_once(nn.Module, "__reduce_ex__", _reducing)


def _reducing(original: Callable[..., Any]) -> Callable[..., Any]:
    def reduce_ex(self: nn.Module, protocol: Any) -> Any:
        reduced = original(self, protocol)
        if current.replica is None or not isinstance(reduced, tuple) or len(reduced) < 3:
            return reduced
        route, state = interceptor_of(self), reduced[2]
        if not isinstance(route, CallInterceptor):
            return reduced
        if isinstance(state, dict):
            state = _own_state(self, state, route)
        elif isinstance(state, tuple) and state and isinstance(state[0], dict):  # it has slots
            state = (_own_state(self, state[0], route), *state[1:])
        return (*reduced[:2], state, *reduced[3:])

    return reduce_ex


def _own_state(module: nn.Module, state: dict[str, Any], route: CallInterceptor) -> dict[str, Any]:
    """Returns the state of a reduced module, with the replica's own values."""
    own_state = dict(state)
    # With attributes first set in this run, unless the class selects its state itself.
    for name in {*state, *route.own} if _gives_all(type(module)) else state:
        found = own_values(module, name) if is_own(module, name) else None
        if found is None:
            continue
        own, replica = found
        value = own.read(replica)
        if value is MISSING:
            own_state.pop(name, None)
        else:
            own_state[name] = value
    return own_state


def _gives_all(kind: type[nn.Module]) -> bool:
    return kind.__reduce__ is object.__reduce__ and (
        getattr(kind, "__getstate__", None) is getattr(nn.Module, "__getstate__", None)
    )
