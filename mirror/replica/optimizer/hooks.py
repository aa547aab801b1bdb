"""What happens before and after ``optimizer.step()``, of any optimizer in the process."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from mirror.compiler import let_go, letting_go, not_compiled, take_hold
from mirror.execution.current import current
from mirror.execution.nesting import refuse_within_another
from mirror.replica.gradients.plain import note_step
from mirror.replica.optimizer.grad_scaler import watch_torchs_scaler
from mirror.replica.optimizer.groups import Once, Parameters, mirrored_group
from mirror.replica.optimizer.making import watch_making
from mirror.replica.optimizer.optimizer import OptimizerMirror
from mirror.replica.optimizer.schedulers import watch_schedulers
from mirror.replica.optimizer.steps import watch_steps
from mirror.replica.optimizer.zero_grad import watch_zero_grad

if TYPE_CHECKING:
    from mirror.execution.replicas import Replica
    from mirror.replica.group import ReplicaGroup

_watching = threading.Lock()
_hooks: list[Any] = []


def watch_optimizer_steps() -> None:
    """Installs the global hooks, once."""
    with _watching:
        if not _hooks:
            hooked = Optimizer.profile_hook_step  # before it is watched
            _hooks.append(register_optimizer_step_pre_hook(_before_step))
            _hooks.append(register_optimizer_step_post_hook(_after_step))
            watch_zero_grad()
            watch_steps(_step_by_turns)
            watch_making()
            watch_schedulers()
            watch_torchs_scaler()
            # Both hooks must see one frame, which the compiler would break up.
            not_compiled(hooked(lambda self: None))  # they share their code


@letting_go
def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    mirror: OptimizerMirror | None = optimizer.__dict__.get("_mirror")
    step = sys._getframe(1)
    if mirror is not None:
        if mirror.is_within_step(step):
            return None  # a subclass's step has called its base's
        mirror.reclaim()
    if mirror is None or not mirror.parameters.are_in(optimizer.param_groups):
        group = mirrored_group(optimizer)
        if group is None:
            note_step(optimizer)
            return None
        mirror = _mirror_of(optimizer, group)
    group = mirror.group
    group.check_usable()
    replica: Any = current.replica
    if replica is not None and replica.group is not group:
        refuse_within_another(group.replicas, "optimizer.step")
    mirror.holds[threading.get_ident()] = let_go()
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if replica is None or replica.group is not group:
        mirror.step_everywhere(step, args, kwargs, closure)
        return None
    if closure is not None:
        with torch.enable_grad():
            once = Once(closure())
        args, kwargs = (args[0], once, *args[2:]), {k: kwargs[k] for k in kwargs if k != "closure"}
    mirror.step_here(step, replica, closure is not None)
    return args, kwargs


def _step_by_turns(step: Any, optimizer: Optimizer, context: Replica) -> Any:
    mirror: OptimizerMirror | None = optimizer.__dict__.get("_mirror")
    if mirror is None or not mirror.parameters.are_in(optimizer.param_groups):
        mirror = _mirror_of(optimizer, context.group)
    return mirror.step_by_turns(step, context)


def _mirror_of(optimizer: Optimizer, group: ReplicaGroup) -> OptimizerMirror:
    with _watching:  # replicas that run at once come here at once
        mirror: OptimizerMirror | None = optimizer.__dict__.get("_mirror")
        if mirror is None or mirror.group is not group:
            # There it goes with the optimizer; its copies and pickles leave it out.
            mirror = optimizer.__dict__["_mirror"] = OptimizerMirror(optimizer, group)
        mirror.parameters = Parameters(optimizer.param_groups)
        return mirror


@letting_go
def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    mirror: OptimizerMirror | None = optimizer.__dict__.get("_mirror")
    if mirror is not None and mirror.step is sys._getframe(1):
        try:
            mirror.end_step()
        finally:
            take_hold(mirror.holds.pop(threading.get_ident(), None))
