"""Parallel backward: a pass outside ``run`` is split, and all replicas' graphs run at once.

[Note: Graph boundaries] in ``graph_boundary.py`` says which passes can be split, and why.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import copy_context
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from mirror.base.dynamo import compiles_backward
from mirror.base.timeline import BACKWARD, CROSS
from mirror.base.torch_private import (
    current_graph_task_id,
    functions_interpreter,
    num_dispatch_modes,
)
from mirror.execution.current_replica import current, push_context, save_context
from mirror.execution.replica_thread import ThreadState
from mirror.execution.runner import Runner
from mirror.replica.gradients.graph_boundary import Node, live_boundaries, split_at_boundaries
from mirror.threads.policies import count_own_hooks

POLL_SECONDS = 0.05  # between two chances for an asynchronous exception
_WHOLE_PASS = {"allow_unreachable": True, "accumulate_grad": True}  # backward, not grad


def backward_at_once(run: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Runs a backward pass in two steps, if it can be split at boundaries.

    Args:
        run: starts the engine.
        args, kwargs: its arguments for this pass.

    Returns:
        Whether the pass was run.
    """
    if not live_boundaries or len(args) != 5 or kwargs != _WHOLE_PASS or _is_observed():
        return False
    outputs, grads, keep_graph, create_graph, inputs = args
    split = None if create_graph or inputs else split_at_boundaries(outputs)
    if split is None:
        return False
    arrived: dict[Node, Tensor | None] = {}

    def store(boundary: Node, grads: tuple[Tensor | None, ...]) -> None:
        arrived[boundary] = grads[0]

    # 1. From the outputs to the boundaries, in this thread; hooks store what arrives there.
    boundaries = [node for nodes in split.boundaries.values() for node in nodes]
    hooks = [boundary.register_prehook(partial(store, boundary)) for boundary in boundaries]
    count_own_hooks(len(hooks))
    ends = tuple(GradientEdge(node, 0) for node in (*split.ends, *boundaries))
    try:
        run(outputs, grads, keep_graph, False, ends, **kwargs)
    finally:
        for hook in hooks:
            hook.remove()
    split.runner.replicas.timeline.end(CROSS, BACKWARD)
    # 2. From the boundaries on, each replica in its thread.
    passes: dict[int, Callable[[], Any]] = {}
    for r, nodes in split.boundaries.items():
        reached = [boundary for boundary in nodes if arrived.get(boundary) is not None]
        starts = tuple(GradientEdge(*boundary.next_functions[0]) for boundary in reached)
        own_grads = tuple(arrived.pop(boundary) for boundary in reached)
        if starts:
            passes[r] = partial(run, starts, own_grads, keep_graph, False, (), **kwargs)
    if passes:
        ParallelBackward(split.runner).run(passes)
    return True


class ParallelBackward:
    """The second step of a split pass, while it runs."""

    def __init__(self, runner: Runner) -> None:
        self._runner, self._replicas = runner, runner.replicas
        self._running: set[int] = set()
        self._replica_ids: dict[int, int] = {}  # by thread
        self._has_stopped = threading.Condition()

    def run(self, passes: dict[int, Callable[[], Any]]) -> None:
        """Runs each replica's pass in its thread."""
        self._running.update(passes)
        sharers = len(passes) if self._runner.schedule.manner.shares_threads else 1
        state = ThreadState.capture(self._replicas, sharers)
        tasks = {r: self._task(r, passes[r], state) for r in passes}
        timed: AbstractContextManager[None] = nullcontext()
        if self._runner.schedule.keeps_order:
            # The report adds up the replicas' times; these overlap, so their span counts once.
            timed = self._replicas.timeline.counting_once(BACKWARD)
        try:
            with timed:
                self._runner.run_parallel_pass(self, tasks)
        finally:
            state.restore()

    def go_alone(self) -> bool:
        """Waits until all other replicas have stopped.

        Returns:
            ``False`` at once in a thread that runs no replica of this pass.
        """
        replica_id = self._replica_ids.get(threading.get_ident())
        if replica_id is None:
            return False
        self._stop(replica_id)
        with self._has_stopped:
            # Python delivers an exception that another thread sends only between two waits.
            while not self._has_stopped.wait_for(lambda: not self._running, POLL_SECONDS):
                pass
            self._running.add(replica_id)
        return True

    def _stop(self, replica_id: int) -> None:
        with self._has_stopped:
            self._running.discard(replica_id)
            self._has_stopped.notify_all()

    def _task(
        self, replica_id: int, run: Callable[[], Any], state: ThreadState
    ) -> Callable[[], None]:
        variables, strategy, timeline = copy_context(), current.strategy, self._replicas.timeline

        def task() -> None:
            before = save_context()
            try:
                push_context(strategy, None)
                self._replica_ids[threading.get_ident()] = replica_id
                timeline.use()
                timeline.begin(replica_id, BACKWARD)
                state.call(self._replicas.devices[replica_id], variables.run, run)
            finally:
                current.replica, current.strategy, current.below = before
                self._running.discard(replica_id)
                timeline.end(replica_id, BACKWARD)
                self._stop(replica_id)

        return task


def _is_observed() -> bool:
    """Whether a mode, a transform or the compiler follows the pass, or another pass runs it."""
    return (
        current_graph_task_id() != -1
        or torch.is_anomaly_enabled()
        or functions_interpreter() is not None
        or num_dispatch_modes() > 0
        or compiles_backward()
    )
