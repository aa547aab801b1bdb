"""Learning-rate schedulers: ``scheduler.step()`` inside ``run``, once for all replicas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from mirror.execution.replicas import Replica
from mirror.replica.optimizers.merge_call_shared import (
    merge_call_shared,
    watched,
    wrap_in_subclasses,
)
from mirror.replica.optimizers.param_groups import replicas_reached


def watch_schedulers() -> None:
    """Makes a scheduler step once if all replicas step it. See [Note: Once]; call it once."""
    wrap_in_subclasses(LRScheduler, "step", lambda step: watched(step, _step_in_run))


def _step_in_run(
    step: Callable[..., Any], scheduler: Any, context: Replica, args: Any, kwargs: Any
) -> Any:
    optimizer = getattr(scheduler, "optimizer", None)
    if optimizer is None or replicas_reached(optimizer) is not context.replicas:
        return step(scheduler, *args, **kwargs)
    result, _ = merge_call_shared(context, step, scheduler, args, kwargs)
    return result
