"""Optimizers that are created inside ``run``, and parameter groups that are added there.

If every replica creates an optimizer, there are N optimizers over parameters that all replicas
share. That raises an error when they step, because one replica may create it for all. A parameter
group that every replica adds is added once, see [Note: Once].
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

from torch import Tensor
from torch.optim import Optimizer

from mirror.errors import StrategyError
from mirror.execution.current_replica import current
from mirror.execution.replicas import Replica
from mirror.replica.optimizers.merge_call_shared import (
    merge_call_shared,
    watched,
    wrap_in_subclasses,
)
from mirror.replica.optimizers.param_groups import replicas_reached
from mirror.replica.params.replicated_param import ReplicaParameter
from mirror.threads.merge_point import MergePoint
from mirror.values import map_structure

Action = Callable[[dict[int, Any]], dict[int, Any]]

_MADE = "_made_in_run"  # in an optimizer's __dict__: whether its constructor has returned


def watch_making() -> None:
    """Marks optimizers that are created inside ``run``; makes groups added there be added once."""
    original = Optimizer.__init__

    @functools.wraps(original)
    def init(self: Optimizer, *args: Any, **kwargs: Any) -> None:
        if current.replica is None:
            original(self, *args, **kwargs)
            return
        vars(self)[_MADE] = False
        original(self, *args, **kwargs)
        vars(self)[_MADE] = True

    Optimizer.__init__ = init  # type: ignore[method-assign]
    wrap_in_subclasses(Optimizer, "add_param_group", lambda add: watched(add, _add_in_run))


def step_point(
    optimizer: Optimizer | None, serial: int, what: str, payload: Any, action: Action
) -> MergePoint:
    """Returns the merge point of an optimizer's step; all replicas must step the same optimizer.

    Optimizers that are created inside ``run`` may have any order, so their serial number does not
    count.
    """
    kind = type(optimizer).__name__
    if optimizer is None or _MADE not in vars(optimizer):
        return MergePoint(what, (f"{kind} #{serial}",), payload, action)

    def act_on_one(payloads: dict[int, Any]) -> dict[int, Any]:
        if any(other is not optimizer for other, _ in payloads.values()):
            _refuse_own(kind)
        return action({r: theirs for r, (_, theirs) in payloads.items()})

    return MergePoint(what, (kind,), (optimizer, payload), act_on_one)


def _refuse_own(kind: str) -> NoReturn:
    raise StrategyError(
        f"every replica has made a {kind} of its own inside strategy.run, over parameters that "
        "all share; make optimizers outside run"
    )


def _add_in_run(
    add: Callable[..., Any], optimizer: Any, context: Replica, args: Any, kwargs: Any
) -> Any:
    is_being_made = not vars(optimizer).get(_MADE, True)
    if is_being_made or replicas_reached(optimizer) is not context.replicas:
        return add(optimizer, *args, **kwargs)
    args = tuple(map(_of_all, args))
    kwargs = {name: _of_all(value) for name, value in kwargs.items()}
    result, _ = merge_call_shared(context, add, optimizer, args, kwargs)
    return result


def _of_all(group: Any) -> Any:
    """Returns a parameter group with the mirrored parameters in place of a replica's copies."""
    if not isinstance(group, dict) or "params" not in group:
        return group
    params = group["params"]
    if not isinstance(params, (Tensor, set)):  # torch refuses sets
        params = list(params)
    return {**group, "params": map_structure(_owner, params)}


def _owner(leaf: Any) -> Any:
    return leaf.variable.owner() if isinstance(leaf, ReplicaParameter) else leaf
