"""What replicas call at the same place with the same object is called once, for all of them.

See [Note: Metrics]: what they give is joined as one device would have given it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mirror.device.device_mesh import DeviceMesh
from mirror.errors import StrategyError
from mirror.execution.replicas import Replica
from mirror.execution.run_state import Run
from mirror.execution.runner import runner_of
from mirror.replica.collectives.reduce_ops import weighted_mean
from mirror.threads.merge_point import MergePoint
from mirror.values import is_number, map_structure

_REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "max": lambda stack: stack.amax(0),
    "min": lambda stack: stack.amin(0),
    "sum": lambda stack: stack.sum(0).to(stack.dtype),
}


def merge_call_joined(
    replica: Replica,
    metric: Any,
    call: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    joining: type[Join] | None = None,
    *,
    is_loose: bool = False,
) -> Any:
    """Calls for all replicas once, with what they give joined; returns the value to each.

    Where each replica has an object of its own, each calls its own.

    Args:
        joining: how it is joined; ``Join`` unless given.
        is_loose: whether those who call it need not be all. See [Note: Loose points].

    Raises:
        StrategyError: what they give cannot be joined.
        DivergenceError: not all replicas that run call it.
    """
    name = type(metric).__name__
    places = replica.replicas.places

    def once(calls: dict[int, _Call]) -> dict[int, Any]:
        weights = replica.run.weights()
        first, *_ = calls.values()
        join = (joining or Join)(first.metric, places, [weights[r] for r in calls], is_loose)
        every = [(one.args, one.kwargs) for one in calls.values()]
        own_args = [join(*values) for values in zip(*(a for a, _ in every), strict=True)]
        own_kwargs = {key: join(*(k[key] for _, k in every)) for key in first.kwargs}
        result = first.call(*own_args, **own_kwargs)
        return {r: _move(result, places, r) for r in calls}

    def action(calls: dict[int, _Call]) -> dict[int, Any]:
        of_object: dict[int, dict[int, _Call]] = {}
        for r, one in calls.items():
            of_object.setdefault(id(one.metric), {})[r] = one
        if is_loose or len(of_object) == 1:
            return {r: result for same in of_object.values() for r, result in once(same).items()}
        return dict.fromkeys(calls, _OWN)

    method = getattr(call, "func", call)  # of a partial one
    signature = name, getattr(method, "__name__", ""), len(args), tuple(sorted(kwargs))
    point = MergePoint(
        f"a call of {name}", signature, _Call(metric, call, args, kwargs), action, "", is_loose
    )
    result = replica.run.merge(replica.replica_id, point)
    return call(*args, **kwargs) if result is _OWN else _watched(result, replica, name)


class _Call(NamedTuple):
    """What one replica calls."""

    metric: Any
    call: Callable[..., Any]
    args: Sequence[Any]
    kwargs: dict[str, Any]


class Join:
    """Joins what the replicas give a metric of torchmetrics.

    Args:
        is_placed: whether it is where the metric is, else where the first replica is.
    """

    def __init__(
        self, metric: Any, places: DeviceMesh, weights: Sequence[float], is_placed: bool = False
    ) -> None:
        self.metric = metric
        self._places = places
        self._weights = weights
        self._home = _device_of(metric) if is_placed else None

    def __call__(self, *parts: Any) -> Any:
        first = parts[0]
        is_count = is_number(first) and not isinstance(first, bool)
        is_lone = len(parts) == 1 and isinstance(first, Tensor)  # it may have to be moved
        if not (is_count or is_lone) and all(part is first for part in parts):
            return first
        if any(type(part) is not type(first) for part in parts):
            self.refuse(parts)
        if isinstance(first, Tensor):
            return self._tensor([part.to(self._home_of(first.device)) for part in parts])
        if isinstance(first, (list, tuple)):
            return type(first)([entry for part in parts for entry in part])
        if isinstance(first, Mapping) and all(part.keys() == first.keys() for part in parts):
            return {key: self(*(part[key] for part in parts)) for key in first}
        if is_count:
            if list(parts) == list(self._weights):
                return sum(parts)
            if any(part != first for part in parts):
                return self._number([torch.as_tensor(part) for part in parts]).item()
        elif any(part != first for part in parts):
            self.refuse(parts)
        return first

    def _home_of(self, device: torch.device) -> torch.device:
        home = self._home
        if home is not None and home.type == device.type:
            return home
        return self._places.replica_at(device)[0]

    def _tensor(self, parts: list[Tensor]) -> Tensor:
        if parts[0].dim() == 0:
            return self._number(parts)
        if any(part.shape[1:] != parts[0].shape[1:] for part in parts):
            self.refuse(parts)
        return torch.cat(parts)

    def _number(self, parts: list[Tensor]) -> Tensor:
        counts, kind = not parts[0].is_floating_point(), self.reduction()
        if kind in ("max", "min") or (kind == "sum" and counts):
            return _REDUCTIONS[kind](torch.stack(parts))
        if kind == "sum":
            self.refuse(parts)
        if not counts:
            return weighted_mean(parts, self._weights)
        if any(not torch.equal(part, parts[0]) for part in parts):
            self.refuse(parts)
        return parts[0]

    def reduction(self) -> str:
        """Returns what an aggregator of numbers does with them: "sum", "max", "min", or ""."""
        metric = getattr(self.metric, "base_metric", self.metric)  # of one over a window
        reductions = list(getattr(metric, "_reductions", {}).values())
        kind: str = getattr(reductions[0], "__name__", "") if len(reductions) == 1 else ""
        return kind.removeprefix("dim_zero_")

    def refuse(self, parts: Sequence[Any]) -> Any:
        """Raises StrategyError for what cannot be joined."""
        raise StrategyError(
            f"{type(self.metric).__name__} is updated once with what all replicas give it, and "
            f"this cannot be joined: {describe_call(parts)}; give it the values of the "
            "examples, one "
            "row each, or update it outside strategy.run and the module, with joined values"
        )


def describe_call(parts: Sequence[Any]) -> str:
    """Returns what the replicas have given, for an error."""
    return ", ".join(
        f"a tensor of shape {tuple(p.shape)}" if isinstance(p, Tensor) else f"{p!r:.40}"
        for p in parts
    )


_OWN = object()  # each replica has an object of its own


def _device_of(metric: Any) -> torch.device | None:
    """Returns where a metric, or the first one of a collection, keeps its states."""
    for module in metric.modules():
        device = getattr(module, "device", None)
        if isinstance(device, torch.device):
            return device
    return None


def _move(result: Any, places: DeviceMesh, replica_id: int) -> Any:
    def moved(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.device in places.devices:
            return leaf.to(places.replica_at(leaf.device)[replica_id])
        return leaf

    return map_structure(moved, result)


def _watched(result: Any, replica: Replica, name: str) -> Any:
    """Returns what a replica is given, to be differentiated after the run alone.

    It is the value of all replicas: its graph goes through all of theirs, and each of them, in a
    backward pass of its own, would go through all of it.
    """

    def watched(leaf: Any) -> Any:
        is_part = isinstance(leaf, Tensor) and leaf.requires_grad
        return _after(leaf, weakref.ref(replica.run), name) if is_part else leaf

    return map_structure(watched, result)


class _After(torch.autograd.Function):
    """Refuses to be differentiated while a run goes on."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, run: weakref.ref[Run], name: str) -> Tensor:
        ctx.run, ctx.metric = run, name
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        run = ctx.run()
        if run is not None and run.is_or_has_within(runner_of(run.replicas).running):
            raise StrategyError(
                f"the value of {ctx.metric} is that of the whole batch, and backward inside "
                "strategy.run is that of one replica's part; differentiate a loss of the part, "
                "such as one of torchmetrics.functional, or call backward after strategy.run"
            )
        return grad, None, None


_after: Any = _After.apply
