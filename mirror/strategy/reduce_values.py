"""Implements ``strategy.reduce`` and ``gather``, which combine parts outside ``run``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from mirror.errors import ShapeError, short_repr
from mirror.execution.replicas import Replicas
from mirror.execution.runner import Runner
from mirror.replica.collectives.autograd_nodes import exchange_parts, not_differentiable, on_device
from mirror.replica.collectives.reduce_ops import check_reducible, reduce_op, summed, weighted_mean
from mirror.replica.exactness.local_losses import ReducedLosses
from mirror.replica.gradients.parallel_backward import mark_boundaries
from mirror.strategy.run_arguments import check_parts
from mirror.values import PerReplica, leaves_of, map_structure

_losses: WeakKeyDictionary[Replicas, ReducedLosses] = WeakKeyDictionary()
_OVER_AXIS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "max": torch.amax,
    "min": torch.amin,
    "prod": torch.prod,
}


def reduce_values(runner: Runner, op: Any, value: Any, axis: int | None) -> Any:
    """See ``Strategy.reduce``."""
    name, replicas = reduce_op(op), runner.replicas
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
        device = (
            _device_for(replicas, leaf)
            if replicas.places.is_model_parallel
            else replicas.devices[0]
        )
        return _reduce(name, leaf, axis, device)

    if not replicas.workers.is_multi_process:
        return map_structure(reduce_leaf, value)
    value, link = exchange_parts(runner, f"reduce({name!r}, axis={axis})", value)
    if name not in ("sum", "mean"):
        return map_structure(reduce_leaf, value)
    return map_structure(lambda leaf: link.link(reduce_leaf(leaf)), value)


def gather_values(runner: Runner, value: Any, axis: int) -> Any:
    """See ``Strategy.gather``."""
    check_parts(runner.replicas.num_replicas, leaves_of(value))
    value, replicas = mark_boundaries(runner, value), runner.replicas

    def gather_leaf(leaf: Any) -> Tensor:
        device = (
            _device_for(replicas, leaf)
            if replicas.places.is_model_parallel
            else replicas.devices[0]
        )
        return _gather(leaf, axis, device)

    if not replicas.workers.is_multi_process:
        return map_structure(gather_leaf, value)
    value, link = exchange_parts(runner, f"gather(axis={axis})", value)
    return map_structure(lambda leaf: link.link(gather_leaf(leaf)), value)


def _device_for(replicas: Replicas, leaf: Any) -> torch.device:
    """Returns the device where a leaf is combined: the first replica's at a part's position."""
    parts = leaf.parts() if isinstance(leaf, PerReplica) else [(0, leaf)]
    for _, value in parts:
        if isinstance(value, Tensor):
            return replicas.places.replica_at(value.device)[0]
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
            (on_device(v, device), 1.0 if weights is None else weights[i]) for i, v in leaf.parts()
        ]
    else:
        parts = [(on_device(leaf, device), 1.0)]
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
            return summed(tensors, device) / len(tensors)
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
    total = summed(own, device)
    return total / sum(tensor.shape[axis] for tensor in tensors) if op == "mean" else total


def _reduce_in_order(op: str, tensors: list[Tensor], device: torch.device) -> Tensor:
    if op == "sum":
        return summed(tensors, device)
    result = summed([tensor.detach() for tensor in tensors], device, op)
    wanted = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    return not_differentiable(result, f"reduce({op!r})") if wanted else result


def _gather(leaf: Any, axis: int, device: torch.device) -> Tensor:
    values = [v for _, v in leaf.parts()] if isinstance(leaf, PerReplica) else [leaf]
    tensors = [on_device(value, device) for value in values]
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
