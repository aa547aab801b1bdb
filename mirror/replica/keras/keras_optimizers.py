"""Keras optimizers: ``apply`` ends a step, and inside ``run`` runs once for all replicas.

Their variables are not mirrored, so replicas step together. Outside ``run`` a step is that of one
device.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch

from mirror.base.dynamo import disable_dynamo
from mirror.base.timeline import OPTIMIZER
from mirror.base.torch_private import wrap_once
from mirror.errors import StrategyError
from mirror.execution.current_replica import current
from mirror.execution.replicas import Replica
from mirror.execution.run_state import Run
from mirror.execution.runner import runner_of
from mirror.execution.step_ends import step_ends
from mirror.replica.gradients.grad_tracker import lane_here
from mirror.replica.keras.keras_layers import keras_device, library
from mirror.threads.merge_point import MergePoint


class _StepState(threading.local):
    is_applying = False


_thread = _StepState()


def wrap_optimizers() -> None:
    """Makes ``apply`` end a step, and run once for all replicas inside ``run``. Idempotent."""
    base = library().optimizers.Optimizer
    wrap_once(base, "apply", _call_once_for_all)
    kinds = [base]
    while kinds:  # an optimizer that wraps another calls the inner apply inside its own
        kind = kinds.pop()
        kinds += type.__subclasses__(kind)
        if "apply" in vars(kind):
            wrap_once(kind, "apply", _ending_a_step)


def _ending_a_step(original: Callable[..., Any]) -> Callable[..., Any]:
    """Reports the step to the timeline and the listeners, like the hooks of torch's optimizers."""

    @disable_dynamo
    def apply(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if _thread.is_applying:
            return original(optimizer, *args, **kwargs)
        timeline, lane = lane_here()
        if timeline is not None:
            timeline.begin(lane, OPTIMIZER, f"{type(optimizer).__name__}.apply")
        _thread.is_applying = True
        try:
            result = original(optimizer, *args, **kwargs)
        finally:
            _thread.is_applying = False
            if timeline is not None:
                timeline.end(lane, OPTIMIZER)
        step_ends.optimizer_stepped(timeline)
        return result

    return apply


def _call_once_for_all(original: Callable[..., Any]) -> Callable[..., Any]:
    @disable_dynamo
    def apply(optimizer: Any, grads: Any, trainable_variables: Any = None) -> Any:
        replica = current.replica
        if replica is None or not replica.replicas.mirrors:
            return original(optimizer, grads, trainable_variables)
        call = functools.partial(original, optimizer)
        return _apply_merged(replica, call, grads, trainable_variables)

    return apply


def _apply_merged(replica: Replica, call: Callable[..., Any], grads: Any, variables: Any) -> Any:
    grads = list(grads)
    variables = None if variables is None else list(variables)
    run = replica.run
    assert isinstance(run, Run)
    runner, device = runner_of(replica.replicas), replica.replicas.devices[0]

    def action(payloads: dict[int, Any]) -> dict[int, Any]:
        (own, named), *others = payloads.values()
        for theirs, _ in others:
            _check_equal(own, theirs)

        def step() -> Any:
            with keras_device(device), torch.no_grad():
                return call([None if g is None else g.to(device) for g in own], named)

        result = runner.call_cross_replica(run, step)
        return dict.fromkeys(payloads, result)

    point = MergePoint("optimizer.apply", len(grads), (grads, variables), action)
    return run.merge(replica.replica_id, point)


def _check_equal(own: list[Any], theirs: list[Any]) -> None:
    """Raises StrategyError if replicas have different gradients: only the first's would apply."""
    for one, other in zip(own, theirs, strict=True):
        if (one is None) is not (other is None) or (
            one is not None and not torch.equal(one, other.to(one.device))
        ):
            raise StrategyError(
                "the replicas call apply of a Keras optimizer with different gradients; pass "
                "[v.value.grad for v in variables] after backward(), which are reduced, or "
                'reduce your own: context.all_reduce("mean", gradients)'
            )
