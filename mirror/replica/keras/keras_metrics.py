"""Keras metrics inside ``run``: one object for all replicas, updated once for the whole batch.

See [Note: Metrics] in ``modules/metric_calls.py``. Inside the call of a Keras layer a metric's
variables are merged like any other variable: [Note: State of Keras layers].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor

from mirror.base.dynamo import disable_dynamo
from mirror.base.torch_private import wrap_once
from mirror.execution.current_replica import current
from mirror.replica.keras.keras_library import is_stateless, keras_device, library
from mirror.replica.scatter_gather.merge_call_joined import Join, merge_call_joined
from mirror.values import leaves_of

_METHODS = ("update_state", "result", "reset_state")


def wrap_metrics() -> None:
    """Makes replicas' calls of Keras metrics happen once for all replicas. Idempotent."""
    base = library().metrics.Metric
    if not wrap_once(base, "__init__", _wrapping_init):
        return
    kinds = [base]
    while kinds:
        kind = kinds.pop()
        kinds += type.__subclasses__(kind)
        _wrap_kind(kind)


def _wrapping_init(original: Callable[..., None]) -> Callable[..., None]:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        for kind in type(self).__mro__[:-1]:
            if issubclass(kind, library().metrics.Metric):  # a class that is newer than the wrap
                _wrap_kind(kind)

    return __init__


def _wrap_kind(kind: type) -> None:
    for name in _METHODS:
        if callable(vars(kind).get(name)):
            wrap_once(kind, name, _call_once_for_all)


def _call_once_for_all(method: Callable[..., Any]) -> Callable[..., Any]:
    @disable_dynamo
    def call(metric: Any, *args: Any, **kwargs: Any) -> Any:
        replica = current.replica
        if replica is None or not replica.replicas.mirrors or is_stateless():
            return method(metric, *args, **kwargs)
        device = replica.replicas.devices[0]

        def once(*args: Any, **kwargs: Any) -> Any:
            with keras_device(device):
                return method(metric, *args, **kwargs)

        return merge_call_joined(replica, metric, once, args, kwargs, KerasJoin)

    return call


class KerasJoin(Join):
    """Joins the replicas' arguments of a Keras metric; structures of tensors entry by entry."""

    def __call__(self, *parts: Any) -> Any:
        first = parts[0]
        if isinstance(first, np.ndarray) and first.ndim:
            return np.concatenate(parts)
        if isinstance(first, (list, tuple)) and any(
            isinstance(leaf, (Tensor, np.ndarray)) for leaf in leaves_of(first)
        ):
            return type(first)([self(*entries) for entries in zip(*parts, strict=True)])
        return super().__call__(*parts)

    def reduction(self) -> str:
        return "sum" if isinstance(self.metric, library().metrics.Sum) else ""
