"""Parallel passes: backward passes outside ``run`` whose replicas' parts are run at once.

Which passes, and why: [Note: Seams] in ``seams.py``.
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
from mirror.replica.gradients.graph_boundary import Node, live_seams, split_at_boundaries
from mirror.threads.policies import count_own_hooks

HEARING_SECONDS = 0.05
_WHOLE_PASS = {"allow_unreachable": True, "accumulate_grad": True}  # backward, not grad


def backward_at_once(run: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Runs a backward pass in two steps, if it comes apart at seams.

    Args:
        run: starts the engine.
        args, kwargs: what it takes for the pass.

    Returns:
        Whether the pass has been run.
    """
    if not live_seams or len(args) != 5 or kwargs != _WHOLE_PASS or _is_tracing():
        return False
    outputs, grads, keep_graph, create_graph, inputs = args
    parts = None if create_graph or inputs else split_at_boundaries(outputs)
    if parts is None:
        return False
    arrived: dict[Node, Tensor | None] = {}

    def note(seam: Node, grads: tuple[Tensor | None, ...]) -> None:
        arrived[seam] = grads[0]

    seams = [seam for mine in parts.seams.values() for seam in mine]
    hooks = [seam.register_prehook(partial(note, seam)) for seam in seams]
    count_own_hooks(len(hooks))
    ends = tuple(GradientEdge(node, 0) for node in (*parts.ends, *seams))
    try:
        run(outputs, grads, keep_graph, False, ends, **kwargs)
    finally:
        for hook in hooks:
            hook.remove()
    parts.runner.replicas.timeline.end(CROSS, BACKWARD)
    passes: dict[int, Callable[[], Any]] = {}
    for r, mine in parts.seams.items():
        reached = [seam for seam in mine if arrived.get(seam) is not None]
        starts = tuple(GradientEdge(*seam.next_functions[0]) for seam in reached)
        own_grads = tuple(arrived.pop(seam) for seam in reached)
        if starts:
            passes[r] = partial(run, starts, own_grads, keep_graph, False, (), **kwargs)
    if passes:
        ParallelBackward(parts.runner).run(passes)
    return True


class ParallelBackward:
    """The second step of a pass, while it goes on."""

    def __init__(self, runner: Runner) -> None:
        self._runner, self._replicas = runner, runner.replicas
        self._moving: set[int] = set()
        self._replica_ids: dict[int, int] = {}  # by thread
        self._has_stopped = threading.Condition()

    def run(self, passes: dict[int, Callable[[], Any]]) -> None:
        """Runs each replica's pass in its thread."""
        self._moving.update(passes)
        sharers = len(passes) if self._runner.schedule.manner.shares_threads else 1
        state = ThreadState.capture(self._replicas, sharers)
        tasks = {r: self._task(r, passes[r], state) for r in passes}
        try:
            with self._counted():
                self._runner.run_parallel_pass(self, tasks)
        finally:
            state.restore()

    def _counted(self) -> AbstractContextManager[None]:
        """Has it counted as long as it takes where all else that replicas do adds up."""
        if self._runner.schedule.keeps_order:
            return self._replicas.timeline.counting_once(BACKWARD)
        return nullcontext()

    def go_alone(self) -> bool:
        """Waits until the other replicas have stopped; ``False`` in a thread that is of none."""
        replica_id = self._replica_ids.get(threading.get_ident())
        if replica_id is None:
            return False
        self._stop(replica_id)
        with self._has_stopped:
            # An exception sent to this thread, whose pass may have failed, wants to be heard.
            while not self._has_stopped.wait_for(lambda: not self._moving, HEARING_SECONDS):
                pass
            self._moving.add(replica_id)
        return True

    def _stop(self, replica_id: int) -> None:
        with self._has_stopped:
            self._moving.discard(replica_id)
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
                self._moving.discard(replica_id)
                timeline.end(replica_id, BACKWARD)
                self._stop(replica_id)

        return task


def _is_tracing() -> bool:
    """Whether something looks at the whole pass, or the thread is in another one."""
    return (
        current_graph_task_id() != -1
        or torch.is_anomaly_enabled()
        or functions_interpreter() is not None
        or num_dispatch_modes() > 0
        or compiles_backward()
    )
