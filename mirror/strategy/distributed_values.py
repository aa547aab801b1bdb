"""Values of all replicas at the borders of a run: arguments, results, ``reduce`` and ``gather``.

The arguments of a run are checked and split, and its results regrouped. ``strategy.reduce`` and
``gather`` combine the parts of ``PerReplica`` values outside ``run``.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from mirror.comm.reduce_ops import (
    check_axis,
    check_reducible,
    reduce_op,
    reduce_tensors,
    weighted_mean,
)
from mirror.errors import ShapeError, StructureError, short_repr
from mirror.execution.replicas import Replicas
from mirror.execution.runner import Runner
from mirror.replica.collectives.autograd_nodes import exchange_parts, move_part, refuse_backward
from mirror.replica.exactness.local_losses import ReducedLosses
from mirror.replica.gradients.parallel_backward import mark_boundaries
from mirror.values import ABSENT, PerReplica, is_number, leaves_of, map_structure, select

_NOT_RUN_BY_A_CALL = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def check_call(fn: Any, args: Any, kwargs: Any, caller: str = "run") -> None:
    """Raises TypeError if the caller cannot call ``fn`` once per replica with these arguments."""
    if not callable(fn):
        raise TypeError(
            f"{caller} takes the function itself, which it calls, got a {type(fn).__name__}; pass "
            f"the function and its arguments: {caller}(step, args=(batch,))"
        )
    if type(args) is not tuple and not isinstance(args, (tuple, list)):
        raise TypeError(
            f"args must be a tuple or a list, got a {type(args).__name__}; one argument is "
            "args=(batch,)"
        )
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise TypeError(f"kwargs must be a mapping of names, got a {type(kwargs).__name__}")
    code = getattr(fn, "__code__", None)
    flags = 0 if code is None else code.co_flags
    if flags & _NOT_RUN_BY_A_CALL:
        kind = "a generator" if flags & inspect.CO_GENERATOR else "an async"
        raise TypeError(
            f"{caller} calls an ordinary function; {fn.__name__} is {kind} function, and its call "
            "executes nothing; return the values from an ordinary function"
        )


def find_active(num_replicas: int, *trees: Any) -> tuple[Sequence[int], Sequence[float] | None]:
    """Returns the replicas that have a part of every PerReplica, and the weights of all replicas.

    Raises:
        StructureError: a PerReplica has a wrong number of parts, or no replica has a part of each.
    """
    leaves: list[Any] = []
    for tree in trees:
        if tree:
            leaves += leaves_of(tree)
    if not leaves:
        return range(num_replicas), None
    values, active = check_parts(num_replicas, leaves)
    if not values:
        return range(num_replicas), None
    if not active:
        raise StructureError("no replica has a part of every PerReplica argument of run")
    for value in values:
        if value.weights is not None:
            return active, value.weights
    return active, None


def check_parts(
    num_replicas: int, leaves: Iterable[Any]
) -> tuple[list[PerReplica[Any]], Sequence[int]]:
    """Returns the PerReplica values among leaves, and the replicas that have a part of each.

    Raises:
        StructureError: a PerReplica has a wrong number of parts.
    """
    values: list[PerReplica[Any]] = []
    ids: Sequence[int] = range(num_replicas)
    for value in leaves:
        if not isinstance(value, PerReplica):
            continue
        values.append(value)
        if len(value.values) != num_replicas:
            got = f"with {len(value.values)}" if value.values else "without parts"
            raise StructureError(
                f"a PerReplica of this strategy has {num_replicas} parts, one per replica; got "
                f"one {got}"
            )
        if type(ABSENT) in map(type, value.values):
            ids = [r for r in ids if value.values[r] is not ABSENT]
    return values, ids


def regroup(
    results: dict[int, Any], num_replicas: int, weights: Sequence[float] | None = None
) -> Any:
    """Joins the results of replicas into one structure with PerReplica leaves.

    Tensors and numbers always become PerReplica; another leaf is unchanged if all replicas
    returned the same object.

    Args:
        results: the results of the active replicas, by replica.

    Raises:
        StructureError: the results differ in structure.
    """

    def join_leaves(*leaves: Any) -> Any:
        first = leaves[0]
        if not isinstance(first, torch.Tensor) and not is_number(first):
            if all(leaf is first for leaf in leaves):
                return first
        values: list[Any] = [ABSENT] * num_replicas
        for replica_id, leaf in zip(results, leaves, strict=True):
            values[replica_id] = leaf
        return PerReplica(values, weights=weights)

    try:
        return map_structure(join_leaves, *results.values())
    except StructureError as error:
        names = ", ".join(map(str, results))
        raise StructureError(
            f"the replicas {names} returned different structures, {error}; return the same "
            "structure from every replica; lists of examples: strategy.local_results(batch)"
        ) from None


def local_results(num_replicas: int, value: Any) -> tuple[Any, ...]:
    """See ``Strategy.local_results``."""
    values, ids = check_parts(num_replicas, leaves_of(value))
    return tuple(select(value, r) for r in ids) if values else (value,)


_losses: WeakKeyDictionary[Replicas, ReducedLosses] = WeakKeyDictionary()
_OVER_AXIS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "max": torch.amax,
    "min": torch.amin,
    "prod": torch.prod,
}


def reduce_values(runner: Runner, op: Any, value: Any, axis: int | None) -> Any:
    """See ``Strategy.reduce``."""
    name, replicas = reduce_op(op), runner.replicas
    if axis is not None:
        check_axis(axis)
    leaves = leaves_of(value)
    check_parts(replicas.num_replicas, leaves)
    if replicas.mirrors and name in ("sum", "prod"):
        _refuse_undistributed(name, leaves)
    if name == "mean" and axis is None and torch.is_grad_enabled():
        for leaf in leaves:
            if isinstance(leaf, PerReplica) and leaf.weights is not None:
                caller = sys._getframe(2)  # the caller of strategy.reduce
                losses = _losses.setdefault(replicas, ReducedLosses())
                losses.check(leaf, (caller.f_code, caller.f_lasti))
    value = mark_boundaries(runner, value)

    def reduce_leaf(leaf: Any) -> Tensor:
        return _reduce(name, leaf, axis, _device_for(replicas, leaf))

    if not replicas.workers.is_multi_process:
        return map_structure(reduce_leaf, value)
    value, link = exchange_parts(runner, f"reduce({name!r}, axis={axis})", value)
    if name not in ("sum", "mean"):
        return map_structure(reduce_leaf, value)
    return map_structure(lambda leaf: link.link(reduce_leaf(leaf)), value)


def gather_values(runner: Runner, value: Any, axis: int) -> Any:
    """See ``Strategy.gather``."""
    check_axis(axis)
    check_parts(runner.replicas.num_replicas, leaves_of(value))
    value, replicas = mark_boundaries(runner, value), runner.replicas

    def gather_leaf(leaf: Any) -> Tensor:
        return _gather(leaf, axis, _device_for(replicas, leaf))

    if not replicas.workers.is_multi_process:
        return map_structure(gather_leaf, value)
    value, link = exchange_parts(runner, f"gather(axis={axis})", value)
    return map_structure(lambda leaf: link.link(gather_leaf(leaf)), value)


def _device_for(replicas: Replicas, leaf: Any) -> torch.device:
    """Returns the device where a leaf is combined: the first replica's at a part's position."""
    parts = leaf.parts() if isinstance(leaf, PerReplica) else [(0, leaf)]
    for _, value in parts:
        if isinstance(value, Tensor):
            return replicas.mesh.peers_of(value.device)[0]
    return replicas.devices[0]


def _refuse_undistributed(op: str, leaves: list[Any]) -> None:
    for leaf in leaves:
        if not isinstance(leaf, PerReplica):
            raise ValueError(
                f"reduce({op!r}) needs one value per replica, a PerReplica as run returns it; got "
                f"{short_repr(leaf)}, which is the same for all"
            )


def _reduce(op: str, leaf: Any, axis: int | None, device: torch.device) -> Tensor:
    if isinstance(leaf, PerReplica):
        weights = leaf.weights
        parts = [
            (move_part(v, device), 1.0 if weights is None else weights[i]) for i, v in leaf.parts()
        ]
    else:
        parts = [(move_part(leaf, device), 1.0)]
    tensors = [tensor for tensor, _ in parts]
    if not tensors:
        raise ValueError(f"reduce({op!r}) of a PerReplica without parts")
    for tensor in tensors:
        check_reducible(tensor)
    if axis is not None:
        return _reduce_over_axis(op, tensors, axis, device)
    if any(tensor.shape != tensors[0].shape for tensor in tensors):
        raise ShapeError(
            f"reduce with axis=None needs equal shapes on all replicas, got {_shapes(tensors)}; "
            "give the axis along which they differ"
        )
    if op == "mean":
        total = sum(weight for _, weight in parts)
        if total:  # a part of weight 0 may be NaN, as the mean over no examples
            parts = [(tensor, weight) for tensor, weight in parts if weight]
            tensors = [tensor for tensor, _ in parts]
        counts = [weight for _, weight in parts]
        if not total or len(set(counts)) == 1:
            return reduce_tensors(tensors, device) / len(tensors)
        return weighted_mean(tensors, counts)
    return _reduce_in_order(op, tensors, device)


def _reduce_over_axis(op: str, tensors: list[Tensor], axis: int, device: torch.device) -> Tensor:
    if any(not -tensor.dim() <= axis < tensor.dim() for tensor in tensors):
        raise ValueError(f"axis {axis} is out of range for shapes {_shapes(tensors)}")
    if op in _OVER_AXIS:
        own = [_OVER_AXIS[op](tensor, axis) for tensor in tensors if tensor.shape[axis]]
        if not own:
            raise ValueError(f"reduce({op!r}) over axis {axis} of no elements")
        return _reduce_in_order(op, own, device)
    own = [tensor.sum(axis) for tensor in tensors]
    if any(tensor.shape != own[0].shape for tensor in own):
        raise ShapeError(f"shapes may differ along axis {axis} only, got {_shapes(tensors)}")
    total = reduce_tensors(own, device)
    return total / sum(tensor.shape[axis] for tensor in tensors) if op == "mean" else total


def _reduce_in_order(op: str, tensors: list[Tensor], device: torch.device) -> Tensor:
    if op == "sum":
        return reduce_tensors(tensors, device)
    result = reduce_tensors([tensor.detach() for tensor in tensors], device, op)
    wanted = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    return refuse_backward(result, f"reduce({op!r})") if wanted else result


def _gather(leaf: Any, axis: int, device: torch.device) -> Tensor:
    values = [v for _, v in leaf.parts()] if isinstance(leaf, PerReplica) else [leaf]
    tensors = [move_part(value, device) for value in values]
    if any(tensor.dim() == 0 for tensor in tensors):
        raise ValueError(
            "gather concatenates tensors of one dimension or more, got 0-d ones; combine them "
            "with strategy.reduce, or take them with strategy.local_results"
        )
    if any(not -tensor.dim() <= axis < tensor.dim() for tensor in tensors):
        raise ValueError(f"axis {axis} is out of range for shapes {_shapes(tensors)}")

    def rest(tensor: Tensor) -> list[int]:
        return [n for i, n in enumerate(tensor.shape) if i != axis % tensor.dim()]

    if any(rest(tensor) != rest(tensors[0]) for tensor in tensors):
        raise ValueError(
            f"gather: shapes may differ along axis {axis} only, got {_shapes(tensors)}"
        )
    return torch.cat(tensors, axis)


def _shapes(tensors: list[Tensor]) -> str:
    return ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
