"""A call that all replicas make on an object they share is made once, in a merge.

Problem: a scheduler, or an optimizer with counters and lists of its own, is one Python object. If
each of N replicas called its ``step``, it would count N steps.
Rule: inside ``run`` such a call is a merge. The call is made once, in the cross-replica context,
over the mirrored parameters; all replicas get the result. It works as outside ``run``, also for an
object that wraps an optimizer or keeps values anywhere.

    argument                  value in the one call
    functions (closures)      a closure that calls each replica's, in a run, and returns their loss
    0-d floating tensors      the loss of the whole batch: their mean, weighted as gradients are,
                              over all workers
    anything else             the argument, which must be equal on all replicas

Learning-rate schedulers step this way, and parameter groups are added this way. Which optimizers
do, ``optimizer_traits.py`` decides. If every replica creates an optimizer inside ``run``, there
are N optimizers over parameters that all replicas share: that raises an error when they step,
because one replica may create it for all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from mirror.base.bitwise import are_equal
from mirror.base.dynamo import disable_and_suspend, resume_dynamo, suspend_dynamo
from mirror.base.torch_private import wrap_once
from mirror.comm.reduce_ops import reduce_tensors
from mirror.errors import StrategyError, short_repr
from mirror.execution.replicas import Replicas
from mirror.execution.run import Replica, Run, current
from mirror.execution.runner import runner_of
from mirror.replica.gradients.parallel_backward import mark_boundary
from mirror.replica.optimizers.param_groups import find_replicas
from mirror.replica.params.replicated_param import ReplicaParameter
from mirror.threads.merge_point import MergePoint
from mirror.values import map_structure

Method = Callable[..., Any]


def wrap_in_subclasses(base: type, name: str, wrap: Callable[[Method], Method]) -> None:
    """Wraps a method of ``base`` and of all its subclasses, future ones included; permanently."""

    def wrap_own(cls: type) -> None:
        method = cls.__dict__.get(name)
        if callable(method) and not is_wrapper(method):
            setattr(cls, name, wrap(method))

    def init_subclass(cls: type, /, **kwargs: Any) -> None:
        if before is None:
            super(base, cls).__init_subclass__(**kwargs)  # type: ignore[arg-type]
        else:
            before.__get__(None, cls)(**kwargs)
        wrap_own(cls)

    before: Any = base.__dict__.get("__init_subclass__")  # one of ours, for another method

    base.__init_subclass__ = classmethod(init_subclass)  # type: ignore[assignment]
    classes, seen = [base], set[type]()
    while classes:
        cls = classes.pop()
        if cls not in seen:
            seen.add(cls)
            wrap_own(cls)
            classes += type.__subclasses__(cls)


def wrap_for_run(method: Method, in_run: Callable[..., Any]) -> Method:
    """Returns a method that is ``in_run(method, self, context, args, kwargs)`` inside ``run``."""

    @disable_and_suspend
    @functools.wraps(method)
    def wrapper(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        replica = current.replica
        if replica is None or not replica.replicas.mirrors:
            return method(self, *args, **kwargs)
        hold = suspend_dynamo()
        try:
            return in_run(method, self, replica, args, kwargs)
        finally:
            resume_dynamo(hold)

    return mark_wrapper(wrapper)


def mark_wrapper(wrapper: Any) -> Method:
    """Marks a wrapper, so that ``is_wrapper`` finds it, and returns it."""
    # A decorator may copy the attributes of a function, so the mark is the function itself.
    wrapper._is_wrapper = wrapper
    marked: Method = wrapper
    return marked


def is_wrapper(method: Any) -> bool:
    """Whether ``mark_wrapper`` has marked this very function."""
    return getattr(method, "_is_wrapper", None) is method


def merge_call_shared(
    context: Replica,
    method: Method,
    target: Any,
    args: Any,
    kwargs: Any,
    *,
    seen: Any = None,
    check: Callable[[dict[int, Any]], None] | None = None,
    serial: int | None = None,
) -> Any:
    """Merges the replicas and calls ``method(target, ...)`` once. See the docstring of this file.

    Args:
        seen: the options that this replica sees in the target.
        check: called before the method with the options of all replicas, by replica id.
        serial: the number of an optimizer that steps; replicas that step another one diverge.

    Returns:
        This replica's result.

    Raises:
        StrategyError: the replicas' targets are not one object, or arguments differ.
    """
    kind = type(target).__name__
    what = f"{kind}.{getattr(method, '__name__', 'step')}"

    def action(payloads: dict[int, Any]) -> dict[int, Any]:
        run = context.run
        assert isinstance(run, Run)
        if any(payload[0] is not target for payload in payloads.values()):
            raise StrategyError(
                f"every replica has called {what} of a {kind} of its own, over parameters that "
                "all share; make it outside strategy.run"
            )
        if check is not None:
            check({r: payload[3] for r, payload in payloads.items()})
        closures: list[_Closure] = []

        def call() -> Any:
            trees = [payloads[r][1:3] for r in run.active]
            joined = functools.partial(_join, run, what, closures)
            one_args, one_kwargs = map_structure(joined, *trees)
            return method(target, *one_args, **one_kwargs)

        result = runner_of(run.replicas).call_cross_replica(run, call)
        for closure in closures:
            if closure.losses is not None and closure.loss is result:
                return closure.losses
        return dict.fromkeys(payloads, result)

    key, name = kind, what
    if serial is not None:
        name = "optimizer.step"
        key = kind if INIT_FINISHED in vars(target) else f"{kind} #{serial}"
    point = MergePoint(name, (key,), (target, tuple(args), dict(kwargs), seen), action)
    return context.run.merge(context.replica_id, point)


class _Closure:
    """One closure for those of all replicas: a run calls them, and it returns their mean loss."""

    def __init__(self, run: Run, closures: dict[int, Callable[[], Any]]) -> None:
        self._run, self._closures = run, closures
        self.loss: Any = None  # the result of the last call
        self.losses: dict[int, Any] | None = None  # the result of each replica

    def __call__(self) -> Any:
        run = self._run
        inner = runner_of(run.replicas).run(
            lambda replica_id: self._closures[replica_id](), run.active, weights=run.all_weights()
        )
        self.losses = inner.results
        self.loss = map_structure(functools.partial(_mean, inner), *inner.results.values())
        return self.loss


def _join(run: Run, what: str, closures: list[_Closure], *leaves: Any) -> Any:
    """Returns the argument of the one call, from the replicas' arguments."""
    first = leaves[0]
    if callable(first) and not isinstance(first, (type, Tensor, nn.Module)):
        closures.append(_Closure(run, dict(zip(run.active, leaves, strict=True))))
        return closures[-1]
    if all(leaf is first for leaf in leaves):
        is_own = isinstance(first, Tensor) and run.replicas.workers.is_multi_process
        return _mean(run, *leaves) if is_own else first
    if all(isinstance(leaf, Tensor) for leaf in leaves):
        if all(leaf.dim() == 0 and leaf.is_floating_point() for leaf in leaves):
            return _mean(run, *leaves)
    if all(are_equal(leaf, first) for leaf in leaves):
        return first
    raise StrategyError(
        f"{what} is done once for all replicas, which have passed it different values: "
        f"{', '.join(map(short_repr, leaves))}; give all the same, all_reduce('mean', ...) of a "
        "replica's context, or call it outside strategy.run"
    )


def _mean(run: Run, *leaves: Any) -> Any:
    """Returns the loss of the whole batch, from the replicas' losses."""
    first = leaves[0]
    if not _is_loss(first):
        return first
    shares = [run.shares()[r] for r in run.active]
    if isinstance(first, float):
        loss: Any = sum(share * leaf for share, leaf in zip(shares, leaves, strict=True))
    else:
        parts = mark_boundary(runner_of(run.replicas), run.active, leaves)
        home = run.replicas.mesh.peers_of(parts[0].device)[0]
        scaled = [part.to(home) * share for part, share in zip(parts, shares, strict=True)]
        loss = reduce_tensors(scaled, home)
    if not run.replicas.workers.is_multi_process:
        return loss
    return average_loss_over_workers(run.replicas, loss, sum(run.weights().values()))


def average_loss_over_workers(replicas: Replicas, loss: Any, weight: float) -> Any:
    """Returns the loss of all workers' examples: all workers take the same decisions by it.

    Its gradient is the gradient of this worker's own loss.

    Args:
        weight: the weight of this worker's loss, if gradients are means.
    """
    if not _is_loss(loss):
        return loss
    own = torch.as_tensor(loss).detach()
    parcels = replicas.workers.exchange_tensors("a loss", None, [own], [weight])
    weights = [parcel.numbers[0] for parcel in parcels]
    if replicas.weighted:
        weights = [one / (sum(weights) or 1.0) for one in weights]
    else:
        weights = [1.0] * len(weights)
    whole = sum(parcel.tensors[0] * w for parcel, w in zip(parcels, weights, strict=True) if w)
    if isinstance(loss, float):
        return float(whole)
    grounded = loss if weight else torch.nan_to_num(loss) * 0.0  # of nothing, that may be NaN
    return grounded + (torch.as_tensor(whole).to(own) - grounded.detach())


def _is_loss(leaf: Any) -> bool:
    if isinstance(leaf, float):
        return True
    return isinstance(leaf, Tensor) and leaf.dim() == 0 and leaf.is_floating_point()


Action = Callable[[dict[int, Any]], dict[int, Any]]
INIT_FINISHED = "_init_finished"  # in the __dict__ of an optimizer that is created in a run


def watch_creation() -> None:
    """Marks optimizers that are created inside ``run``; makes groups added there be added once."""
    wrap_once(Optimizer, "__init__", _wrap_init)
    wrap_in_subclasses(Optimizer, "add_param_group", lambda add: wrap_for_run(add, _add_in_run))


def _wrap_init(original: Callable[..., None]) -> Callable[..., None]:
    def init(self: Optimizer, *args: Any, **kwargs: Any) -> None:
        if current.replica is None:
            original(self, *args, **kwargs)
            return
        vars(self)[INIT_FINISHED] = False
        original(self, *args, **kwargs)
        vars(self)[INIT_FINISHED] = True

    return init


def _add_in_run(
    add: Callable[..., Any], optimizer: Any, context: Replica, args: Any, kwargs: Any
) -> Any:
    is_being_made = not vars(optimizer).get(INIT_FINISHED, True)
    if is_being_made or find_replicas(optimizer) is not context.replicas:
        return add(optimizer, *args, **kwargs)
    args = tuple(map(_replace_copies, args))
    kwargs = {name: _replace_copies(value) for name, value in kwargs.items()}
    return merge_call_shared(context, add, optimizer, args, kwargs)


def _replace_copies(group: Any) -> Any:
    """Returns a parameter group with the mirrored parameters in place of a replica's copies."""
    if not isinstance(group, dict) or "params" not in group:
        return group
    params = group["params"]
    if not isinstance(params, (Tensor, set)):  # torch refuses sets
        params = list(params)
    return {**group, "params": map_structure(_owner, params)}


def _owner(leaf: Any) -> Any:
    return leaf.variable.owner() if isinstance(leaf, ReplicaParameter) else leaf


def watch_schedulers() -> None:
    """Makes a scheduler step once if all replicas step it. Call it once."""
    wrap_in_subclasses(LRScheduler, "step", lambda step: wrap_for_run(step, _step_in_run))


def _step_in_run(
    step: Callable[..., Any], scheduler: Any, context: Replica, args: Any, kwargs: Any
) -> Any:
    optimizer = getattr(scheduler, "optimizer", None)
    if optimizer is None or find_replicas(optimizer) is not context.replicas:
        return step(scheduler, *args, **kwargs)
    return merge_call_shared(context, step, scheduler, args, kwargs)
