"""Metrics of torchmetrics inside a mirrored module: updated once, with the whole batch.

So is what ``forward`` of a LightningModule gives to ``self.log``: logged once.

[Note: Metrics]
A metric that ``forward`` updates has one state, not one per replica: a call of it in a replica, or
of its ``update``, ``compute`` and ``reset``, is a merge. There what the replicas give it is joined
and given to it once, as one device would have done, so that every metric is exact: also one
whose states cannot be joined afterwards (a mean of means), the value of the batch that a call
returns, and the compute groups of a collection, which are found by comparing states.

    the replicas give                       the metric gets
    tensors of one dimension or more        their concatenation, however many rows each has
    lists (of strings, of detections)       their entries, one replica after the other
    0-d floating tensors, floats            their mean, weighted by examples
    0-d tensors and numbers that are equal  that
    numbers that are those of examples      their sum
    to an aggregator such as MaxMetric      what its state's own reduction makes of 0-d tensors
    anything else                           StrategyError
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mirror.accelerator.places import Places
from mirror.compiler import opaque
from mirror.concurrency.merge_point import MergePoint
from mirror.errors import StrategyError
from mirror.execution.current import current
from mirror.execution.replicas import Replica
from mirror.replica.collectives.reduction import weighted_mean
from mirror.replica.routing import owner_of
from mirror.values import is_number, map_structure

_LIGHTNING = ("lightning.pytorch", "pytorch_lightning")
_WRAPPED = "_mirror_wrapped"
_wrapping = threading.Lock()


def is_metric(module: nn.Module) -> bool:
    """Whether a module is a metric, or a collection of them; asks only if there are any."""
    library = sys.modules.get("torchmetrics")
    if library is None:
        return False
    kinds = tuple(getattr(library, name, ()) for name in ("Metric", "MetricCollection"))
    return isinstance(module, tuple(k for k in kinds if k != ()))


def watch_log(module: nn.Module) -> None:
    """Has what replicas of a LightningModule log, if it is one, logged once."""
    for name in _LIGHTNING:
        kind = getattr(sys.modules.get(name), "LightningModule", None)
        if kind is not None and isinstance(module, kind):
            with _wrapping:
                if not hasattr(kind.log, _WRAPPED):
                    kind.log = _merged(kind.log)


def watch_metric(module: nn.Module) -> None:
    """Has what replicas do with a metric done once."""
    attributes = module.__dict__
    with _wrapping:
        for name in ("update", "compute"):
            # On a metric they are attributes, which its copies and pickles leave out.
            method = attributes.get(name)
            if method is not None and not hasattr(method, _WRAPPED):
                attributes[name] = _merged(method, module)
        for kind in type(module).__mro__:
            is_library = kind.__module__ in ("torch.nn.modules.module", "builtins")
            names = ("reset",) if "update" in attributes else ("update", "compute", "reset")
            for name in () if is_library else names:
                method = kind.__dict__.get(name)
                if callable(method) and not hasattr(method, _WRAPPED):
                    setattr(kind, name, _merged(method))


def _merged(method: Callable[..., Any], module: nn.Module | None = None) -> Callable[..., Any]:
    """Wraps a bound method of ``module``, or a method of a class."""

    @functools.wraps(method)
    @opaque
    def call(*args: Any, **kwargs: Any) -> Any:
        replica = current.replica
        metric = args[0] if module is None else module
        if replica is None or owner_of(metric) is not replica.replicas:
            return method(*args, **kwargs)
        if module is None:
            return call_once(replica, metric, functools.partial(method, metric), args[1:], kwargs)
        return call_once(replica, metric, method, args, kwargs)

    setattr(call, _WRAPPED, True)
    return call


def call_once(
    replica: Replica,
    metric: nn.Module,
    call: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> Any:
    """Calls for all replicas once, with what they give joined; returns the value to each.

    Raises:
        StrategyError: what they give cannot be joined.
        DivergenceError: not all replicas that run call it.
    """
    name = type(metric).__name__
    places = replica.replicas.places

    def action(payloads: dict[int, Any]) -> dict[int, Any]:
        weights = replica.run.weights()
        every = list(payloads.values())
        join = _Join(metric, places, [weights[r] for r in payloads])
        own_args = [join(*values) for values in zip(*(a for a, _ in every), strict=True)]
        own_kwargs = {key: join(*(k[key] for _, k in every)) for key in every[0][1]}
        result = call(*own_args, **own_kwargs)
        return {r: _moved(result, places, r) for r in payloads}

    signature = name, len(args), tuple(sorted(kwargs))
    point = MergePoint(f"a call of {name}", signature, (args, kwargs), action)
    return replica.run.merge(replica.replica_id, point)


class _Join:
    """Joins what the replicas give a metric."""

    def __init__(self, metric: Any, places: Places, weights: Sequence[float]) -> None:
        self._metric = metric
        self._places = places
        self._weights = weights

    def __call__(self, *parts: Any) -> Any:
        first = parts[0]
        is_count = is_number(first) and not isinstance(first, bool)
        if not is_count and all(part is first for part in parts):
            return first
        if any(type(part) is not type(first) for part in parts):
            self._refuse(parts)
        if isinstance(first, Tensor):
            home = self._places.at(first.device)[0]
            return self._tensor([part.to(home) for part in parts])
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
            self._refuse(parts)
        return first

    def _tensor(self, parts: list[Tensor]) -> Tensor:
        if parts[0].dim() == 0:
            return self._number(parts)
        if any(part.shape[1:] != parts[0].shape[1:] for part in parts):
            self._refuse(parts)
        return torch.cat(parts)

    def _number(self, parts: list[Tensor]) -> Tensor:
        reductions = list(getattr(self._metric, "_reductions", {}).values())
        kind = getattr(reductions[0], "__name__", "") if len(reductions) == 1 else ""
        counts = not parts[0].is_floating_point()
        if kind in ("dim_zero_max", "dim_zero_min") or (kind == "dim_zero_sum" and counts):
            reduced: Tensor = reductions[0](torch.stack(parts))
            return reduced
        if kind == "dim_zero_sum":
            self._refuse(parts)
        if not counts:
            return weighted_mean(parts, self._weights)
        if any(not torch.equal(part, parts[0]) for part in parts):
            self._refuse(parts)
        return parts[0]

    def _refuse(self, parts: Sequence[Any]) -> Any:
        given = ", ".join(
            f"a tensor of shape {tuple(p.shape)}" if isinstance(p, Tensor) else f"{p!r:.40}"
            for p in parts
        )
        name = type(self._metric).__name__
        if not is_metric(self._metric):
            raise StrategyError(
                f"{name}.log logs once what all replicas give it, and this cannot be joined: "
                f"{given}; give it a mean over examples, or log it in training_step"
            )
        raise StrategyError(
            f"{name} is updated once with what all replicas give it, and "
            f"this cannot be joined: {given}; give it the values of the examples, one row each, "
            "or update it outside the module with the joined outputs"
        )


def _moved(result: Any, places: Places, replica_id: int) -> Any:
    def moved(leaf: Any) -> Any:
        return leaf.to(places.at(leaf.device)[replica_id]) if isinstance(leaf, Tensor) else leaf

    return map_structure(moved, result)
