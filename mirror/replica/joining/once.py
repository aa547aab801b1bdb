"""What all replicas call at the same place with the same object is called once, for all.

See [Note: Metrics]: what they give is joined as one device would have given it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mirror.accelerator.places import Places
from mirror.concurrency.merge_point import MergePoint
from mirror.errors import StrategyError
from mirror.execution.replicas import Replica
from mirror.replica.collectives.reduction import weighted_mean
from mirror.values import is_number, map_structure

_REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "max": lambda stack: stack.amax(0),
    "min": lambda stack: stack.amin(0),
    "sum": lambda stack: stack.sum(0).to(stack.dtype),
}


def call_once(
    replica: Replica,
    metric: Any,
    call: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    joining: type[Join] | None = None,
) -> Any:
    """Calls for all replicas once, with what they give joined; returns the value to each.

    Where each replica has an object of its own, each calls its own.

    Args:
        joining: how it is joined; ``Join`` unless given.

    Raises:
        StrategyError: what they give cannot be joined.
        DivergenceError: not all replicas that run call it.
    """
    name = type(metric).__name__
    places = replica.replicas.places

    def action(payloads: dict[int, Any]) -> dict[int, Any]:
        weights = replica.run.weights()
        every = [(a, k) for _, a, k in payloads.values()]
        if len({id(m) for m, _, _ in payloads.values()}) > 1:
            return dict.fromkeys(payloads, _OWN)
        join = (joining or Join)(metric, places, [weights[r] for r in payloads])
        own_args = [join(*values) for values in zip(*(a for a, _ in every), strict=True)]
        own_kwargs = {key: join(*(k[key] for _, k in every)) for key in every[0][1]}
        result = call(*own_args, **own_kwargs)
        return {r: _moved(result, places, r) for r in payloads}

    signature = name, len(args), tuple(sorted(kwargs))
    point = MergePoint(f"a call of {name}", signature, (metric, args, kwargs), action)
    result = replica.run.merge(replica.replica_id, point)
    return call(*args, **kwargs) if result is _OWN else result


class Join:
    """Joins what the replicas give a metric of torchmetrics."""

    def __init__(self, metric: Any, places: Places, weights: Sequence[float]) -> None:
        self.metric = metric
        self._places = places
        self._weights = weights

    def __call__(self, *parts: Any) -> Any:
        first = parts[0]
        is_count = is_number(first) and not isinstance(first, bool)
        if not is_count and all(part is first for part in parts):
            return first
        if any(type(part) is not type(first) for part in parts):
            self.refuse(parts)
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
            self.refuse(parts)
        return first

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
        reductions = list(getattr(self.metric, "_reductions", {}).values())
        kind: str = getattr(reductions[0], "__name__", "") if len(reductions) == 1 else ""
        return kind.removeprefix("dim_zero_")

    def refuse(self, parts: Sequence[Any]) -> Any:
        """Raises StrategyError for what cannot be joined."""
        raise StrategyError(
            f"{type(self.metric).__name__} is updated once with what all replicas give it, and "
            f"this cannot be joined: {in_words(parts)}; give it the values of the examples, one "
            "row each, or update it outside the module with the joined outputs"
        )


def in_words(parts: Sequence[Any]) -> str:
    """Returns what the replicas have given, for an error."""
    return ", ".join(
        f"a tensor of shape {tuple(p.shape)}" if isinstance(p, Tensor) else f"{p!r:.40}"
        for p in parts
    )


_OWN = object()  # each replica has an object of its own


def _moved(result: Any, places: Places, replica_id: int) -> Any:
    def moved(leaf: Any) -> Any:
        return leaf.to(places.at(leaf.device)[replica_id]) if isinstance(leaf, Tensor) else leaf

    return map_structure(moved, result)
