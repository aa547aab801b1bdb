"""Metrics that replicas update are updated once, with the arguments of all replicas joined.

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
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mirror.base.dynamo import disable_dynamo
from mirror.base.mutex import Mutex
from mirror.base.torch_private import wrap_once
from mirror.comm.reduce_ops import weighted_mean
from mirror.device.device_mesh import DeviceMesh
from mirror.errors import StrategyError
from mirror.execution.run import Replica, Run, Unverifiable, current
from mirror.execution.runner import runner_of
from mirror.replica.modules.module_owner import owner_of
from mirror.threads.merge_point import MergePoint
from mirror.values import is_number, map_structure

_REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "max": lambda stack: stack.amax(0),
    "min": lambda stack: stack.amin(0),
    "sum": lambda stack: stack.sum(0).to(stack.dtype),
}

_OWN = object()  # a result that makes each replica call its own object


def merge_call_joined(
    replica: Replica,
    metric: Any,
    call: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    joining: type[Join] | None = None,
    *,
    is_partial: bool = False,
) -> Any:
    """Calls once with the joined arguments of all replicas; returns the value on each replica.

    If the replicas have different objects, each calls its own.

    Args:
        joining: the class that joins the arguments; ``Join`` by default.
        is_partial: whether only some of the replicas may call. See [Note: Partial merge points].

    Raises:
        StrategyError: the arguments cannot be joined.
        DivergenceError: not all active replicas call it, and ``is_partial`` is false.
    """
    name = type(metric).__name__
    mesh = replica.replicas.mesh

    def call_once(calls: dict[int, _Call]) -> dict[int, Any]:
        weights = replica.run.weights()
        first, *_ = calls.values()
        join = (joining or Join)(first.metric, mesh, [weights[r] for r in calls], is_partial)
        every = [(one.args, one.kwargs) for one in calls.values()]
        own_args = [join(*values) for values in zip(*(a for a, _ in every), strict=True)]
        own_kwargs = {key: join(*(k[key] for _, k in every)) for key in first.kwargs}
        result = first.call(*own_args, **own_kwargs)
        return {r: _move(result, mesh, r) for r in calls}

    def action(calls: dict[int, _Call]) -> dict[int, Any]:
        calls_by_object: dict[int, dict[int, _Call]] = {}
        for r, one in calls.items():
            calls_by_object.setdefault(id(one.metric), {})[r] = one
        if is_partial or len(calls_by_object) == 1:
            return {
                r: result
                for same in calls_by_object.values()
                for r, result in call_once(same).items()
            }
        return dict.fromkeys(calls, _OWN)

    method = getattr(call, "func", call)  # of a partial one
    signature = name, getattr(method, "__name__", ""), len(args), tuple(sorted(kwargs))
    point = MergePoint(
        f"a call of {name}", signature, _Call(metric, call, args, kwargs), action, "", is_partial
    )
    result = replica.run.merge(replica.replica_id, point)
    return (
        call(*args, **kwargs) if result is _OWN else _forbid_local_backward(result, replica, name)
    )


class _Call(NamedTuple):
    """The call of one replica."""

    metric: Any
    call: Callable[..., Any]
    args: Sequence[Any]
    kwargs: dict[str, Any]


class Join:
    """Joins the replicas' arguments of a metric of torchmetrics.

    Args:
        is_placed: whether results are on the metric's device, else on the first replica's.
    """

    def __init__(
        self, metric: Any, mesh: DeviceMesh, weights: Sequence[float], is_placed: bool = False
    ) -> None:
        self.metric = metric
        self._mesh = mesh
        self._weights = weights
        self._device = _device_of(metric) if is_placed else None

    def __call__(self, *parts: Any) -> Any:
        first = parts[0]
        is_count = is_number(first) and not isinstance(first, bool)
        is_only = len(parts) == 1 and isinstance(first, Tensor)  # it may be on another device
        if not (is_count or is_only) and all(part is first for part in parts):
            return first
        if any(type(part) is not type(first) for part in parts):
            self.refuse(parts)
        if isinstance(first, Tensor):
            return self._tensor([part.to(self._device_for(first.device)) for part in parts])
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

    def _device_for(self, device: torch.device) -> torch.device:
        placed = self._device
        if placed is not None and placed.type == device.type:
            return placed
        return self._mesh.peers_of(device)[0]

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
        """Returns an aggregator's reduction of numbers: "sum", "max", "min", or "" for others."""
        metric = getattr(self.metric, "base_metric", self.metric)  # a window wraps its metric
        reductions = list(getattr(metric, "_reductions", {}).values())
        kind: str = getattr(reductions[0], "__name__", "") if len(reductions) == 1 else ""
        return kind.removeprefix("dim_zero_")

    def refuse(self, parts: Sequence[Any]) -> Any:
        """Raises StrategyError: the arguments cannot be joined."""
        raise StrategyError(
            f"{type(self.metric).__name__} is updated once with the arguments of all replicas, "
            f"and these cannot be joined: {describe_call(parts)}; pass one row per example, or "
            "update the metric outside strategy.run and the module, with joined values"
        )


def describe_call(parts: Sequence[Any]) -> str:
    """Returns a description of the replicas' arguments, for errors."""
    return ", ".join(
        f"a tensor of shape {tuple(p.shape)}" if isinstance(p, Tensor) else f"{p!r:.40}"
        for p in parts
    )


def _device_of(metric: Any) -> torch.device | None:
    """Returns the device of the states of a metric, or of the first one of a collection."""
    for module in metric.modules():
        device = getattr(module, "device", None)
        if isinstance(device, torch.device):
            return device
    return None


def _move(result: Any, mesh: DeviceMesh, replica_id: int) -> Any:
    def to_replica(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.device in mesh.devices:
            return leaf.to(mesh.peers_of(leaf.device)[replica_id])
        return leaf

    return map_structure(to_replica, result)


def _forbid_local_backward(result: Any, replica: Replica, name: str) -> Any:
    """Returns a replica's result, which raises if it is differentiated before the run ends.

    The result is the value of all replicas, and so is its graph: inside ``run`` each replica's
    backward pass would go through the graphs of all replicas.
    """

    def wrap(leaf: Any) -> Any:
        is_part = isinstance(leaf, Tensor) and leaf.requires_grad
        return _after(leaf, weakref.ref(replica.run), name) if is_part else leaf

    return map_structure(wrap, result)


class _After(torch.autograd.Function):
    """Raises StrategyError in a backward pass while the run is active."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, run: weakref.ref[Run], name: str) -> Tensor:
        ctx.run, ctx.metric = run, name
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        run = ctx.run()
        if run is not None and run.is_or_has_within(runner_of(run.replicas).running):
            raise StrategyError(
                f"the value of {ctx.metric} covers the whole batch, but backward inside "
                "strategy.run covers one replica's part; differentiate a loss of the part, such "
                "as one of torchmetrics.functional, or call backward after strategy.run"
            )
        return grad, None, None


_after: Any = _After.apply
_LIGHTNING = ("lightning.pytorch", "pytorch_lightning")
_WRAPPED = "_mirror_wrapped"
_wrapping = Mutex()
# Of metrics and collections; then those of a MetricTracker.
_METHODS = ("update", "compute", "forward", "reset")
_OF_TRACKERS = ("increment", "reset_all", "compute_all", "best_metric")
# Until the metrics of this library are watched; a look at it costs a run no call.
unwatched_libraries = ["torchmetrics"]


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
            wrap_once(kind, "log", _wrap_method)


def watch_lone_metrics() -> None:
    """Makes replicas' calls of metrics outside mirrored modules merge calls; permanently."""
    if not unwatched_libraries or "torchmetrics" not in sys.modules:
        return
    kinds = _kinds()
    if len(kinds) < 3:
        return  # another thread imports it
    unwatched_libraries.clear()
    for kind in kinds:
        wrap_once(kind, "__init__", _wrap_init)
        if "__setstate__" in vars(kind):  # of copies
            wrap_once(kind, "__setstate__", _wrap_init)
    metrics = set(kinds)
    for made in gc.get_objects():
        if not metrics.isdisjoint(type(made).__mro__):
            watch_metric(made)


def _wrap_init(original: Callable[..., None]) -> Callable[..., None]:
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        watch_metric(self)

    return init


def watch_metric(module: nn.Module) -> None:
    """Makes replicas' calls of a metric merge calls."""
    _wrapping.call(_merge_methods, module)


def _merge_methods(module: nn.Module) -> None:
    attributes = module.__dict__
    for name in ("update", "compute"):
        # Metrics have them as instance attributes, which copies and pickles do not contain.
        method = attributes.get(name)
        if method is not None and not hasattr(method, _WRAPPED):
            attributes[name] = _wrap_method(method, module)
    names = [*(_METHODS[2:] if "update" in attributes else _METHODS)]
    names += _OF_TRACKERS if hasattr(module, "increment") else ()
    for kind in type(module).__mro__:
        is_library = kind.__module__ in ("torch.nn.modules.module", "builtins")
        for name in () if is_library else names:
            method = kind.__dict__.get(name)
            if callable(method) and not hasattr(method, _WRAPPED):
                setattr(kind, name, _wrap_method(method))


def _wrap_method(
    method: Callable[..., Any], module: nn.Module | None = None
) -> Callable[..., Any]:
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
        if replica.run.is_trial and is_lone and is_kind:
            raise Unverifiable(f"forward updates a {type(metric).__name__} outside the model")
        if replica.run.is_trial and not is_kind:
            return None  # the replicas will log it
        is_partial = is_lone and not replica.run.is_split
        own, given = method, args
        if module is None:
            own, given = functools.partial(method, metric), args[1:]
        joining = Join if is_kind else _Logged
        return merge_call_joined(
            replica, metric, own, given, kwargs, joining, is_partial=is_partial
        )

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
