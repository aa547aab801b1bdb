"""Metrics of torchmetrics that replicas update are updated once, with the whole batch.

In the same way, ``self.log`` in ``forward`` of a LightningModule logs once for all replicas.

[Note: Metrics]
Problem: a metric that ``forward`` updates must have one state, not one per replica. The states of
some metrics cannot be joined afterwards: a mean of means, a collection's compute groups.
Rule: in a replica, a call of a metric, or of its ``update``, ``compute`` and ``reset``, is a
merge. The replicas' arguments are joined, and the metric is called once, as on one device.

    arguments of the replicas               argument of the metric
    tensors of one dimension or more        their concatenation, however many rows each has
    lists (of strings, of detections)       their entries, one replica after the other
    0-d floating tensors, floats            their mean, weighted by examples
    0-d tensors and numbers that are equal  that
    numbers of examples                     their sum
    0-d tensors to MaxMetric and the like   the reduction that its state declares
    anything else                           StrategyError

A lone metric, which is in no mirrored module, is also one object for all replicas. Inside ``run``
not all replicas need to call it (``if replica_id == 0``), and each may have its own: replicas that
call the same object at the same time are joined, without waiting for other replicas. In a split
call all must call it. Metrics have their methods as instance attributes, so lone metrics are
wrapped when they are created; the garbage collector finds those created before the first run.
"""

from __future__ import annotations

import functools
import gc
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from mirror.base.dynamo import disable_dynamo
from mirror.base.torch_private import wrap_once
from mirror.errors import StrategyError
from mirror.execution.current_replica import current
from mirror.replica.modules.call_interceptor import owner_of
from mirror.replica.scatter_gather.merge_call_joined import Join, describe_call, merge_call_joined

_LIGHTNING = ("lightning.pytorch", "pytorch_lightning")
_WRAPPED = "_mirror_wrapped"
_wrapping = threading.Lock()
# Of metrics and collections; then those of a MetricTracker.
_METHODS = ("update", "compute", "forward", "reset")
_OF_TRACKERS = ("increment", "reset_all", "compute_all", "best_metric")
_are_watched = False


def is_metric(module: object) -> bool:
    """Whether a module is a metric, or a collection of metrics."""
    return "torchmetrics" in sys.modules and isinstance(module, _kinds())


def _kinds() -> tuple[type, ...]:
    library: Any = sys.modules["torchmetrics"]
    kinds = (getattr(library, name, None) for name in ("Metric", "MetricCollection"))
    wrappers: Any = sys.modules.get("torchmetrics.wrappers")
    return tuple(k for k in (*kinds, getattr(wrappers, "MetricTracker", None)) if k is not None)


def watch_log(module: nn.Module) -> None:
    """Makes ``self.log`` of a LightningModule log once for all replicas."""
    for name in _LIGHTNING:
        kind = getattr(sys.modules.get(name), "LightningModule", None)
        if kind is not None and isinstance(module, kind):
            with _wrapping:
                if not hasattr(kind.log, _WRAPPED):
                    kind.log = _merged(kind.log)


def watch_lone_metrics() -> None:
    """Makes replicas' calls of metrics outside mirrored modules merge calls; permanently."""
    global _are_watched
    if _are_watched or "torchmetrics" not in sys.modules:
        return
    kinds = _kinds()
    if len(kinds) < 3:
        return  # another thread imports it
    _are_watched = True
    for kind in kinds:
        wrap_once(kind, "__init__", _watching)
        if "__setstate__" in vars(kind):  # of copies
            wrap_once(kind, "__setstate__", _watching)
    metrics = set(kinds)
    for made in gc.get_objects():
        if not metrics.isdisjoint(type(made).__mro__):
            watch_metric(made)


def _watching(original: Callable[..., None]) -> Callable[..., None]:
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        watch_metric(self)

    return init


def watch_metric(module: nn.Module) -> None:
    """Makes replicas' calls of a metric merge calls."""
    attributes = module.__dict__
    with _wrapping:
        for name in ("update", "compute"):
            # Metrics have them as instance attributes, which copies and pickles do not contain.
            method = attributes.get(name)
            if method is not None and not hasattr(method, _WRAPPED):
                attributes[name] = _merged(method, module)
        names = [*(_METHODS[2:] if "update" in attributes else _METHODS)]
        names += _OF_TRACKERS if hasattr(module, "increment") else ()
        for kind in type(module).__mro__:
            is_library = kind.__module__ in ("torch.nn.modules.module", "builtins")
            for name in () if is_library else names:
                method = kind.__dict__.get(name)
                if callable(method) and not hasattr(method, _WRAPPED):
                    setattr(kind, name, _merged(method))


def _merged(method: Callable[..., Any], module: nn.Module | None = None) -> Callable[..., Any]:
    """Wraps a bound method of ``module``, or a method of a class."""

    @functools.wraps(method)
    @disable_dynamo
    def call(*args: Any, **kwargs: Any) -> Any:
        replica = current.replica
        if replica is None:
            return method(*args, **kwargs)
        metric = args[0] if module is None else module
        is_lone, is_kind = owner_of(metric) is not replica.replicas, is_metric(metric)
        if is_lone and not (is_kind and replica.replicas.num_replicas > 1):
            return method(*args, **kwargs)
        is_loose = is_lone and not replica.run.is_split
        own, given = method, args
        if module is None:
            own, given = functools.partial(method, metric), args[1:]
        joining = Join if is_kind else _Logged
        return merge_call_joined(replica, metric, own, given, kwargs, joining, is_loose=is_loose)

    setattr(call, _WRAPPED, True)
    return call


class _Logged(Join):
    """Joins the replicas' arguments of ``self.log``."""

    def refuse(self, parts: Sequence[Any]) -> Any:
        raise StrategyError(
            f"{type(self.metric).__name__}.log logs once what all replicas give it, and this "
            f"cannot be joined: {describe_call(parts)}; give it a mean over examples, or "
            "log it in "
            "training_step"
        )
