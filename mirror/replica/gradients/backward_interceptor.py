"""When backward passes begin and end: for gradients and the timeline.

Torch has hooks for gradients, but none for the start of a backward pass: the function through
which ``backward`` and ``torch.autograd.grad`` start the engine is wrapped, once, when the first
strategy is made. It costs a microsecond a pass. There, too, passes outside ``run`` come apart: see
[Note: Seams].
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from mirror.base.dynamo import disable_dynamo
from mirror.base.timeline import BACKWARD, CROSS, Timeline, latest
from mirror.base.torch_private import PASS, current_graph_task_id, wrap_once
from mirror.execution.current_replica import current, renaming
from mirror.execution.runner import runner_of
from mirror.replica.gradients.grad_hooks import refuse_hooks_of
from mirror.replica.gradients.grad_tracker import BackwardPass, GradTracker
from mirror.replica.gradients.parallel_backward import backward_at_once
from mirror.replica.gradients.unmirrored import leaves_of, note_pass
from mirror.replica.multi_worker.stand_in import start_without_examples
from mirror.replica.params.mirrored_parameter import MirroredParameter
from mirror.replica.params.replicated_params import param_of
from mirror.replica.params.torch_function import all_leaves

_lock = threading.Lock()
_watches: tuple[weakref.ref[GradTracker], ...] = ()  # what wants to know of backward passes


def watch_backward() -> None:
    """Has every backward pass noted on the timeline it belongs to."""
    if hasattr(torch.autograd, PASS):
        wrap_once(torch.autograd, PASS, _wrap_backward)


def register_listener(watch: GradTracker) -> bool:
    """Has ``watch`` told where backward passes begin and end; whether that is possible."""
    global _watches
    with _lock:
        alive = (known for known in _watches if known() is not None)
        _watches = (*alive, weakref.ref(watch))
    return hasattr(torch.autograd, PASS)


def _wrap_backward(run: Callable[..., Any]) -> Callable[..., Any]:
    @disable_dynamo
    def noted(*args: Any, **kwargs: Any) -> Any:
        if current.replica is not None and current.replica.tracing is not None:
            return run(*args, **kwargs)
        args, accumulates = _with_all_leaves(*args), kwargs.get("accumulate_grad", True)
        if accumulates and not getattr(args[0][0], "requires_grad", True):
            args = start_without_examples(*args)
        timeline, lane = lane_here()
        if timeline is not None:
            timeline.begin(lane, BACKWARD)
        replica = None
        if lane != CROSS:
            args = _with_own_gradients(*args)
            replica = current.replica
            if replica is not None and accumulates:
                note_pass(replica.run, lane, args)
            elif replica is not None:
                refuse_hooks_of(args[4])
        elif accumulates:
            _refuse_beside_runs(args)
        this, told = BackwardPass(), list[tuple[GradTracker, int | None]]()
        try:
            if accumulates:
                _tell_watches(this, told)
            if replica is not None:  # the engine works without the interpreter
                replica.run.lockstep.let_next_begin(lane)
            if replica is not None and replica.replicas.places.is_model_parallel:
                with renaming(replica):  # which torch has taken off this thread, for backward
                    return run(*args, **kwargs)
            if lane != CROSS or not backward_at_once(run, args, kwargs):
                return run(*args, **kwargs)
            return None
        finally:
            this.is_over = True
            for watch, replica_id in told:
                watch.end_pass(this, replica_id)
            if timeline is not None:
                timeline.end(lane, BACKWARD)

    return noted


def _with_all_leaves(outputs: Any, grads: Any, *rest: Any) -> tuple[Any, ...]:
    """Puts copies where ``backward(inputs=...)`` has mirrored parameters.

    Older versions of torch do not ask the inputs whether they override ``backward``.
    """
    retain, create, inputs, *others = rest
    if any(isinstance(given, MirroredParameter) for given in inputs):
        inputs = tuple(all_leaves(inputs))
    return outputs, grads, retain, create, inputs, *others


def _with_own_gradients(outputs: Any, grads: Any, *rest: Any) -> tuple[Any, ...]:
    """Clones the gradients a user has passed: all replicas' may be one, and end in ``.grad``."""
    own = (grad.clone() if grad is not None and grad.dim() else grad for grad in grads)
    return outputs, tuple(own), *rest


def _refuse_beside_runs(args: Any) -> None:
    """Raises if a pass in the cross-replica context brings gradients to what another thread runs.

    They would be taken for a part of what the run's own passes bring, and weighted as that.
    """
    for known in _watches:
        watch = known()
        if watch is None or not runner_of(watch.replicas).runs_elsewhere:
            continue
        for leaf in leaves_of(args):
            variable = param_of(leaf)
            if variable is not None and variable.replicas is watch.replicas:
                runner_of(watch.replicas).check_between_runs("a backward pass")


def _tell_watches(this: BackwardPass, told: list[tuple[GradTracker, int | None]]) -> None:
    """Tells that a pass begins: the watch of the current replica, whose it is, and all others."""
    replica = current.replica
    within = current_graph_task_id() != -1
    for known in _watches:
        watch = known()
        if watch is not None:
            replica_id = None
            if replica is not None and watch.replicas is replica.replicas:
                replica_id = replica.replica_id
            watch.begin_pass(this, replica_id, within=within)
            told.append((watch, replica_id))


def lane_here() -> tuple[Timeline | None, int]:
    """Returns the timeline, and the lane in it, of the code that asks."""
    replica = current.replica
    if replica is None:
        return latest(), CROSS
    return replica.replicas.timeline, replica.replica_id
