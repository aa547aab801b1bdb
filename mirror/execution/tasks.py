"""Tasks: what a replica's thread does in a run, around the function that it calls."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import copy_context
from functools import partial
from typing import Any

from mirror.devices import backward_in_calling_thread, using
from mirror.execution.current import current, push_context, save_context, renaming
from mirror.execution.run import Run
from mirror.execution.thread_state import ThreadState
from mirror.timeline import FORWARD


def task_of(
    run: Run, replica_id: int, fn: Callable[[int], Any], state: ThreadState | None
) -> Callable[[], Any]:
    """Returns what calls ``fn(replica_id)`` as that replica, under the caller's state.

    Args:
        state: ``None`` for one on the CPU without others beside it, which has the caller's.
    """
    replica, replicas = run.members[replica_id], run.replicas
    device = replica.device
    strategy, timeline = replicas.strategy, replicas.timeline

    def call() -> Any:
        before = save_context()
        try:
            push_context(strategy, replica)
            timeline.use()  # by this thread, which may have the cross-replica context in a merge
            timeline.begin(replica_id, FORWARD)
            return _call(fn, run, replica_id)
        finally:
            current.replica, current.strategy, current.below = before
            timeline.end(replica_id, FORWARD)
            if replica.lent:
                replica.give_back()

    if state is None:
        return call
    variables = copy_context()

    def renamed() -> Any:
        with renaming(replica):
            return call()

    def task() -> Any:
        if replicas.places.is_model_parallel:
            with using(device), backward_in_calling_thread((device,)):
                return state.call(partial(variables.run, renamed), device)
        if len(run.active) == 1:
            with using(device):
                return call()
        if replicas.are_simulated:  # on the CPU there is nothing to enter
            return state.call(partial(variables.run, call), device)
        with using(device), backward_in_calling_thread((device,)):
            return state.call(partial(variables.run, call), device)

    return task


def _call(fn: Callable[[int], Any], run: Run, replica_id: int) -> Any:
    """Calls a replica's function, which draws from its own random stream."""
    if run.streams is not None and run.streams.inside != replica_id:
        run.streams.enter(replica_id)
    result = _measured(fn, run, replica_id) if run.stopwatches else fn(replica_id)
    if run.stepped:
        for stepped, left in run.stepped.items():
            left[replica_id] = stepped.options()
    return result


def _measured(fn: Callable[[int], Any], run: Run, replica_id: int) -> Any:
    watch = run.stopwatches[replica_id]
    watch.start()
    try:
        return fn(replica_id)
    finally:
        watch.stop()
