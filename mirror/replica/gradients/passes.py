"""When backward passes and optimizer steps begin and end: for gradients and the timeline.

Torch has hooks for optimizer steps, and for gradients, but none for the start of a backward pass:
the function through which ``backward`` and ``torch.autograd.grad`` start the engine is wrapped,
once, when the first strategy is made. It costs a microsecond a pass. There, too, passes outside
``run`` come apart: see [Note: Seams].
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from mirror.compiler import opaque
from mirror.execution.current import current
from mirror.replica.gradients.gradient_hooks import refuse_hooks_of
from mirror.replica.gradients.parallel_pass import backward_at_once
from mirror.replica.gradients.plain import note_pass
from mirror.timeline import BACKWARD, CROSS, OPTIMIZER, Timeline, latest

_START = "_engine_run_backward"
_lock = threading.Lock()
_hooks: list[Any] = []
_watches: tuple[weakref.ref[Any], ...] = ()  # what wants to know of backward passes


def watch_passes(install_others: Callable[[], None]) -> None:
    """Has every backward pass and optimizer step noted on the timeline it belongs to.

    Args:
        install_others: installs hooks of optimizer steps whose time counts.
    """
    with _lock:
        is_new = not _hooks
        if is_new:
            _hooks.append(register_optimizer_step_pre_hook(_step_begins))
        install_others()
        if is_new:
            _hooks.append(register_optimizer_step_post_hook(_step_ends))
            run = getattr(torch.autograd, _START, None)
            if run is not None:
                setattr(torch.autograd, _START, _noting(run))


def watch_passes_of(watch: Any) -> bool:
    """Has ``watch`` told where backward passes begin and end; whether that is possible."""
    global _watches
    with _lock:
        alive = (known for known in _watches if known() is not None)
        _watches = (*alive, weakref.ref(watch))
    return hasattr(torch.autograd, _START)


def _noting(run: Callable[..., Any]) -> Callable[..., Any]:
    @opaque
    @functools.wraps(run)
    def noted(*args: Any, **kwargs: Any) -> Any:
        timeline, lane = _here()
        if timeline is not None:
            timeline.begin(lane, BACKWARD)
        if lane != CROSS:
            args = _with_own_gradients(*args)
            if kwargs.get("accumulate_grad", True):
                replica: Any = current.replica
                note_pass(replica.run, lane, args)
            else:
                refuse_hooks_of(args[4])
        told = _tell_watches() if kwargs.get("accumulate_grad", True) else ()
        try:
            if lane != CROSS or not backward_at_once(run, args, kwargs):
                return run(*args, **kwargs)
            return None
        finally:
            for watch, this, replica_id in told:
                watch.end_pass(this, replica_id)
            if timeline is not None:
                timeline.end(lane, BACKWARD)

    return noted


def _with_own_gradients(outputs: Any, grads: Any, *rest: Any) -> tuple[Any, ...]:
    """Clones the gradients a user has passed: all replicas' may be one, and end in ``.grad``."""
    own = (grad.clone() if grad is not None and grad.dim() else grad for grad in grads)
    return outputs, tuple(own), *rest


def _tell_watches() -> list[tuple[Any, object, int | None]]:
    """Tells that a pass begins: the watch of the current replica, whose it is, and all others."""
    replica: Any = current.replica
    mine = None if replica is None else replica.group.gradients.watch
    within = torch._C._current_graph_task_id() != -1
    told: list[tuple[Any, object, int | None]] = []
    for known in _watches:
        watch = known()
        if watch is not None:
            replica_id = replica.replica_id if watch is mine else None
            told.append((watch, watch.begin_pass(replica_id, within=within), replica_id))
    return told


# Not opaque: the compiler may follow the steps of optimizers that are not mirrored.


def _step_begins(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        return
    timeline, lane = _here()
    if timeline is not None:
        timeline.begin(lane, OPTIMIZER, f"{type(optimizer).__name__}.step")


def _step_ends(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        return
    timeline, lane = _here()
    if timeline is not None:
        timeline.end(lane, OPTIMIZER)
        if not _is_within_another(sys._getframe(1)):
            timeline.note_update(lane)


def _is_within_another(step: FrameType) -> bool:
    """Whether another step has called this one: a subclass's, or one that steps all replicas."""
    caller = step.f_back
    while caller is not None and caller.f_code is not step.f_code:
        caller = caller.f_back
    return caller is not None


def _here() -> tuple[Timeline | None, int]:
    replica = current.replica
    if replica is None:
        return latest(), CROSS
    return replica.replicas.timeline, replica.replica_id
