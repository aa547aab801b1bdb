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
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from mirror.compiler import opaque
from mirror.errors import StrategyError
from mirror.execution.current import current
from mirror.replica.joining.once import Join, call_once, in_words
from mirror.replica.routing import owner_of

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
        joining = Join if is_metric(metric) else _Logged
        if module is None:
            own = functools.partial(method, metric)
            return call_once(replica, metric, own, args[1:], kwargs, joining)
        return call_once(replica, metric, method, args, kwargs, joining)

    setattr(call, _WRAPPED, True)
    return call


class _Logged(Join):
    """Joins what the replicas give to ``self.log``."""

    def refuse(self, parts: Sequence[Any]) -> Any:
        raise StrategyError(
            f"{type(self.metric).__name__}.log logs once what all replicas give it, and this "
            f"cannot be joined: {in_words(parts)}; give it a mean over examples, or log it in "
            "training_step"
        )
