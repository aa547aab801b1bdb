"""What any optimizer in the process tells mirror: that it steps, and ``zero_grad()``."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch.optim import Optimizer

from mirror.base.dynamo import (
    disable_and_suspend,
    disable_dynamo,
    resume_dynamo,
    skip_frame,
    suspend_dynamo,
)
from mirror.base.timeline import OPTIMIZER
from mirror.base.torch_private import put_hooks_around, wrap_once
from mirror.execution.current_replica import current, refuse_within_another, replica_of
from mirror.execution.replicas import Replica, Replicas
from mirror.execution.step_ends import step_ends
from mirror.replica.gradients.backward_interceptor import lane_here
from mirror.replica.gradients.non_finite import only_replicas, refuse_step
from mirror.replica.gradients.unmirrored import check_step
from mirror.replica.optimizers.created_in_run import watch_making
from mirror.replica.optimizers.global_hooks import global_hooks
from mirror.replica.optimizers.grad_scaler import watch_torchs_scaler
from mirror.replica.optimizers.lr_schedulers import watch_schedulers
from mirror.replica.optimizers.merge_call_shared import whole_loss
from mirror.replica.optimizers.mirrored_optimizer import MirroredOptimizer
from mirror.replica.optimizers.optimizer_registry import optimizers_of
from mirror.replica.optimizers.param_groups import ParamGroupsView, StepOnce, replicas_in
from mirror.replica.optimizers.step_dispatch import watch_steps

_watching = threading.Lock()


def watch_optimizer_steps(*, are_mirrored: bool) -> None:
    """Installs the global hooks, once; those that lend with the first strategy that mirrors."""
    with _watching:
        if not are_mirrored and not global_hooks:
            global_hooks.install((_step_begins,), (_step_ends,))
        elif are_mirrored and len(global_hooks) < 2:
            global_hooks.install((_step_begins, _before_step), (_after_step, _step_ends))
            wrap_once(Optimizer, "zero_grad", _clearing_at_once)
            watch_steps(_step_by_turns)
            watch_making()
            watch_schedulers()
            watch_torchs_scaler()
            # Both hooks must see one frame, which the compiler would break up.
            skip_frame(put_hooks_around(lambda self: None))  # they share their code


@disable_and_suspend
def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    if current.replica is not None and current.replica.tracing is not None:
        return None  # who traces has lent it
    mirror: MirroredOptimizer | None = optimizer.__dict__.get("_mirror")
    step = sys._getframe(1)
    if mirror is not None:
        if mirror.loan.is_within_step(step):
            return None  # a subclass's step has called its base's
        mirror.recover()
    if mirror is None or not mirror.loan.parameters.are_in(optimizer.param_groups):
        replicas = replicas_in(optimizer)
        if replicas is None:
            check_step(optimizer)
            return None
        mirror = _mirror_of(optimizer, replicas)
    mirror.runner.check_usable()
    global_hooks.enclose()
    replica = replica_of(mirror.replicas)
    if replica is None and current.replica is not None:
        refuse_within_another(mirror.replicas, "optimizer.step")
    mirror.holds[threading.get_ident()] = suspend_dynamo()
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if replica is None:
        mirror.step_cross_replica(step, args, kwargs, closure)
        if closure is None or not mirror.replicas.workers.is_multi_process:
            return None
        workers = mirror.replicas.workers

        def whole() -> Any:
            return whole_loss(mirror.replicas, closure(), workers.weight)

        return _with_closure(args, kwargs, whole)
    if closure is not None:
        with torch.enable_grad():
            once = StepOnce(closure())
        args, kwargs = _with_closure(args, kwargs, once)
    mirror.step_in_run(step, replica, closure is not None)
    return args, kwargs


def _with_closure(args: Any, kwargs: Any, closure: Any) -> tuple[Any, Any]:
    """Returns the arguments of a step with another closure."""
    return (args[0], closure, *args[2:]), {k: kwargs[k] for k in kwargs if k != "closure"}


def _step_by_turns(step: Any, optimizer: Optimizer, context: Replica) -> Any:
    mirror: MirroredOptimizer | None = optimizer.__dict__.get("_mirror")
    if mirror is None or not mirror.loan.parameters.are_in(optimizer.param_groups):
        mirror = _mirror_of(optimizer, context.replicas)
    return mirror.step_leader_first(step, context)


def _mirror_of(optimizer: Optimizer, replicas: Replicas) -> MirroredOptimizer:
    with _watching:  # replicas that run at once come here at once
        mirror: MirroredOptimizer | None = optimizer.__dict__.get("_mirror")
        if mirror is None or mirror.replicas is not replicas:
            # There it goes with the optimizer; its copies and pickles leave it out.
            mirror = MirroredOptimizer(optimizer, optimizers_of(replicas))
            optimizer.__dict__["_mirror"] = mirror
        mirror.loan.parameters = ParamGroupsView(optimizer.param_groups)
        return mirror


@disable_and_suspend
def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    mirror: MirroredOptimizer | None = optimizer.__dict__.get("_mirror")
    if mirror is not None and mirror.loan.step is sys._getframe(1):
        try:
            mirror.end_step()
        finally:
            resume_dynamo(mirror.holds.pop(threading.get_ident(), None))


def _clearing_at_once(original: Callable[..., None]) -> Callable[..., None]:
    """Returns a ``zero_grad`` that asks once whether a reduction is to be waited for.

    Torch's own goes through the parameters one by one, and every look at ``p.grad`` asks.
    """

    @disable_dynamo
    def zero_grad(self: Optimizer, set_to_none: bool = True) -> None:
        mirror: MirroredOptimizer | None = self.__dict__.get("_mirror")  # from its first step on
        if current.replica is not None and current.replica.tracing is not None:
            mirror = None
        if mirror is None or not set_to_none or not mirror.clear_gradients():
            original(self, set_to_none)

    return zero_grad


# Not opaque: the compiler may follow the steps of optimizers that are not mirrored.


def _step_begins(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        return
    if only_replicas:
        refuse_step(optimizer)
    timeline, lane = lane_here()
    if timeline is not None:
        timeline.begin(lane, OPTIMIZER, f"{type(optimizer).__name__}.step")


def _step_ends(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        return
    timeline, lane = lane_here()
    if timeline is not None:
        timeline.end(lane, OPTIMIZER)
    if not _is_within_another(sys._getframe(1)):
        step_ends.optimizer_stepped(timeline)


def _is_within_another(step: FrameType) -> bool:
    """Whether another step has called this one: a subclass's, or one that steps all replicas."""
    caller = step.f_back
    while caller is not None and caller.f_code is not step.f_code:
        caller = caller.f_back
    return caller is not None
