"""The public names of ``mirror.metrics``: merges metrics that replicas have updated separately."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mirror.base.migration_hints import names_of
from mirror.errors import short_repr
from mirror.values import PerReplica, map_structure


def merge(metrics: Any) -> Any:
    """Returns one metric with the updates of all replicas' metrics.

    Its ``compute()`` returns the value of one device. The replicas' metrics are unchanged::

        devices = iter(strategy.devices)  # this worker's, in the order of its replicas
        metrics = strategy.distribute_values_from_function(
            lambda context: MulticlassAccuracy(10).to(next(devices))
        )
        for batch in strategy.distribute_dataset(loader):
            strategy.run(evaluate, args=(model, batch, metrics))  # metric.update(outputs, y)
        accuracy = mirror.metrics.merge(metrics).compute()

    With several workers, ``compute()`` covers all of them, and all must call it.

    Args:
        metrics: a PerReplica of ``torchmetrics.Metric`` or ``MetricCollection``, or a structure
            of them. Metrics without updates do not count. A metric that is not distributed is
            taken as the only one.

    Returns:
        A new metric, or the structure of new metrics, on the first replica's device. Compute it,
        but do not update it: some metrics hold their parts separately until they are computed.

    Raises:
        TypeError: ``metrics`` is not a PerReplica of metrics.
        ValueError: a state that is averaged over replicas differs between them, and the weights
            of its parts are unknown.
    """
    return map_structure(_merge, metrics)


def _merge(metrics: Any) -> nn.Module:
    parts = [part for _, part in metrics.parts()] if isinstance(metrics, PerReplica) else [metrics]
    if not parts or not all(_is_metric(part) for part in parts):
        raise TypeError(
            "merge takes a PerReplica of torchmetrics, made by "
            f"strategy.distribute_values_from_function, got {short_repr(metrics)}"
        )
    seen = [part for part in parts if any(map(_is_updated, part.modules()))] or parts[:1]
    merged: nn.Module = copy.deepcopy(seen[0])
    # A collection, or a metric that wraps another, has metrics among its modules.
    for target, *sources in zip(merged.modules(), *(part.modules() for part in seen), strict=True):
        updated = [source for source in sources if _is_updated(source)]
        if updated:
            _merge_states(target, updated)
    return merged.to(_device(parts[0]))


def _merge_states(target: Any, sources: list[Any]) -> None:
    for name, reduction in target._reductions.items():
        states = [getattr(source, name) for source in sources]
        setattr(target, name, _reduce_state(states, reduction, name, target.device))
    target._update_count = sum(source.update_count for source in sources)
    target._computed = None


def _reduce_state(states: list[Any], reduction: Any, name: str, device: torch.device) -> Any:
    """Returns one combined state, as torchmetrics combines states that it gathers."""
    if isinstance(states[0], list):
        return [_move(entry, device) for state in states for entry in state]
    tensors = [state.to(device) for state in states]
    kind = getattr(reduction, "__name__", "")
    if len(tensors) == 1:
        return tensors[0].clone()
    if kind == "dim_zero_cat":
        return torch.cat(tensors)
    if kind == "dim_zero_mean":
        if any(not torch.equal(tensor, tensors[0]) for tensor in tensors):
            raise ValueError(
                f"the metric's state {name!r} is a mean over replicas, but the weights of its "
                "parts are unknown; combine the values with strategy.reduce instead"
            )
        return tensors[0].clone()
    stacked = torch.stack(tensors)
    return stacked if reduction is None else reduction(stacked)


def _is_metric(value: object) -> bool:
    return isinstance(value, nn.Module) and any(
        hasattr(module, "_reductions") for module in value.modules()
    )


def _is_updated(module: Any) -> bool:
    return hasattr(module, "_reductions") and bool(module.update_called)


def _device(metric: nn.Module) -> torch.device:
    module: Any = next(module for module in metric.modules() if hasattr(module, "_reductions"))
    device: torch.device = module.device
    return device


def _move(entry: Any, device: torch.device) -> Any:
    return entry.to(device) if isinstance(entry, Tensor) else entry


if not TYPE_CHECKING:  # type checkers must report unknown names
    __getattr__ = names_of("mirror.metrics")
