"""Interception of backward passes: their begin and end, for gradients and for the timeline.

Torch has hooks for gradients, but none for the start of a backward pass. So the function through
which ``backward`` and ``torch.autograd.grad`` start the engine is wrapped, once, when the first
strategy is created. The wrapper costs one microsecond per pass. It also splits passes outside
``run``: see [Note: Graph boundaries].
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from mirror.base.dynamo import disable_dynamo
from mirror.base.timeline import BACKWARD, CROSS, Timeline, latest
from mirror.base.torch_private import (
    PASS,
    current_graph_task_id,
    transforms_of,
    without_transforms,
    wrap_once,
)
from mirror.errors import StrategyError
from mirror.execution.current_replica import current, renaming
from mirror.execution.runner import runner_of
from mirror.replica.gradients.grad_tracker import BackwardPass, GradTracker
from mirror.replica.gradients.parallel_backward import backward_at_once
from mirror.replica.gradients.unmirrored import check_pass, leaves_of
from mirror.replica.multi_worker.stand_in import start_without_examples
from mirror.replica.params.mirrored_parameter import MirroredParameter
from mirror.replica.params.replicated_param import ReplicaParameter
from mirror.replica.params.replicated_params import param_of
from mirror.replica.params.torch_function import all_leaves

_lock = threading.Lock()
_trackers: tuple[weakref.ref[GradTracker], ...] = ()  # those that are called for every pass


def watch_backward() -> None:
    """Wraps the start of backward passes; does nothing where torch lacks the function."""
    if hasattr(torch.autograd, PASS):
        wrap_once(torch.autograd, PASS, _wrap_backward)


def register_listener(tracker: GradTracker) -> bool:
    """Registers a tracker for the begin and end of every backward pass.

    Returns:
        Whether this torch can report them.
    """
    global _trackers
    with _lock:
        alive = (reference for reference in _trackers if reference() is not None)
        _trackers = (*alive, weakref.ref(tracker))
    return hasattr(torch.autograd, PASS)


def _wrap_backward(run: Callable[..., Any]) -> Callable[..., Any]:
    @disable_dynamo
    def wrapped_backward(*args: Any, **kwargs: Any) -> Any:
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
                check_pass(replica.run, lane, args)
            elif replica is not None:
                _refuse_hooks(args[4])
        elif accumulates:
            _refuse_during_runs(args)
        elif transforms_of(args[0][0]):
            _refuse_transformed(args[0], args[4])
        this, begun = BackwardPass(), list[tuple[GradTracker, int | None]]()
        try:
            if accumulates:
                _begin_in_trackers(this, begun)
            if replica is not None:  # the engine runs without the GIL
                replica.run.lockstep.let_next_begin(lane)
            if replica is not None and replica.replicas.places.is_model_parallel:
                with renaming(replica):  # torch removes this mode for the time of backward
                    return run(*args, **kwargs)
            if lane != CROSS or not backward_at_once(run, args, kwargs):
                return run(*args, **kwargs)
            return None
        finally:
            this.is_over = True
            for tracker, replica_id in begun:
                tracker.end_pass(this, replica_id)
            if timeline is not None:
                timeline.end(lane, BACKWARD)

    return wrapped_backward


def lane_here() -> tuple[Timeline | None, int]:
    """Returns the timeline of the calling code, and its lane in it."""
    replica = current.replica
    if replica is None:
        return latest(), CROSS
    return replica.replicas.timeline, replica.replica_id


def _with_all_leaves(outputs: Any, grads: Any, *rest: Any) -> tuple[Any, ...]:
    """Replaces mirrored parameters in ``backward(inputs=...)`` by their copies.

    Needed by older versions of torch: they ignore ``__torch_function__`` of the inputs here.
    """
    retain, create, inputs, *others = rest
    for given in inputs:
        if isinstance(given, MirroredParameter):
            inputs = tuple(all_leaves(inputs))
            break
    return outputs, grads, retain, create, inputs, *others


def _with_own_gradients(outputs: Any, grads: Any, *rest: Any) -> tuple[Any, ...]:
    """Clones the gradients that a user passes.

    All replicas may pass the same tensor, and autograd may put it into ``.grad`` as it is.
    """
    own = list(grads)
    for i, grad in enumerate(grads):
        if grad is not None and grad.dim():
            own[i] = grad.clone()
    return outputs, tuple(own), *rest


def _refuse_hooks(inputs: Iterable[Any]) -> None:
    """Raises StrategyError for ``torch.autograd.grad`` inside ``run`` if an input has hooks.

    A hook sees the gradient of the whole batch, and a replica has only its own.
    """
    for captured in inputs:
        if not isinstance(captured, ReplicaParameter):
            continue
        variable = captured.variable
        if variable.hooks and len(variable.copies) > 1:
            raise StrategyError(
                f"torch.autograd.grad inside strategy.run gives each replica its own gradient, "
                f"but a hook of parameter {variable.name!r} has to see that of the whole batch; "
                "call it outside run, use backward(), or remove the hook"
            )


def _refuse_transformed(outputs: Iterable[Any], inputs: Iterable[Any]) -> None:
    """Raises StrategyError if torch.func differentiates by parameters on one of several workers.

    A function that calls a mirrored module is refused at the call; this one calls none.
    Gradients of single examples, under ``vmap``, need no other worker.
    """
    if any("vmap" in transforms_of(output) for output in outputs):
        return
    for transformed in inputs:
        variable = param_of(without_transforms(transformed))
        if variable is not None and variable.replicas.workers.is_multi_process:
            raise StrategyError(
                f"torch.func differentiates by the mirrored parameter {variable.name!r} outside "
                "run, on one of several workers: the gradient would be of this worker's examples "
                "alone; use loss.backward() or torch.autograd.grad(loss, parameters), which give "
                "that of all workers, or detach the parameters for this worker's own gradient"
            )


def _refuse_during_runs(args: Any) -> None:
    """Raises StrategyError for a pass in the cross-replica context while another thread runs.

    Its gradients would be taken for those of the run's own passes, and weighted like them.
    """
    for reference in _trackers:
        tracker = reference()
        if tracker is None or not runner_of(tracker.replicas).runs_elsewhere:
            continue
        for leaf in leaves_of(args):
            variable = param_of(leaf)
            if variable is not None and variable.replicas is tracker.replicas:
                runner_of(tracker.replicas).check_between_runs("a backward pass")


def _begin_in_trackers(this: BackwardPass, begun: list[tuple[GradTracker, int | None]]) -> None:
    """Calls ``begin_pass`` of all trackers, and appends each to ``begun``.

    The tracker of the current replica gets its index, the others get None.
    """
    replica = current.replica
    within = current_graph_task_id() != -1
    for reference in _trackers:
        tracker = reference()
        if tracker is not None:
            replica_id = None
            if replica is not None and tracker.replicas is replica.replicas:
                replica_id = replica.replica_id
            tracker.begin_pass(this, replica_id, within=within)
            begun.append((tracker, replica_id))
