"""Parallel backward: a pass outside ``run`` is split, and all replicas' graphs run at once.

[Note: Graph boundaries]
Outside ``run`` one backward pass goes through the graphs of all replicas in one thread. To split
it, every operation that joins the replicas' tensors (a split call, ``reduce``, ``gather``) takes a
view of each. The view's node is the boundary; it carries the replica's index. No other code holds
the view, so the boundary has no hooks. A pass that reaches boundaries runs in two steps:

    loss -> cat -+-> boundary -> graph of replica 0    1. to the boundaries, in the calling thread
                 +-> boundary -> graph of replica 1    2. behind them, in the replicas' threads

First a walk over the nodes checks that the graphs behind the boundaries share no node with each
other or with step 1, and that they contain nothing that may concern another replica:

    a node written in Python            collectives, compiled code, reentrant checkpointing; it
                                        needs the GIL anyway; not a compiled module's, if the
                                        pass is split where the module is not compiled,
                                        under "parallel" and "staggered"
    saved tensors unpacked by a hook    checkpointing: it sets the state of the random generator
    a node that hides what it saves     may do the same
    a parameter with hooks              they see the reduced gradient when the pass ends

Otherwise the pass runs unsplit. Each replica's nodes run in the same order as in one pass, so the
gradients have the same bits as one pass with the same number of intra-op threads.

A tensor's hook may read a gradient, which merges the replicas. It then waits until every other
replica has ended or waits in a hook too, and from then on its replica runs alone. A hook of
several tensors (``register_multi_grad_hook``) is called once per split part, with its gradients.

Only simulated devices have boundaries: where all replicas of a run start at once, see
[Note: Turns], or where "auto" has found passes to be long, see [Note: Long passes].
In the second case a pass is split only while the program has no hooks of its own, because the
hooks would be called in another order. GPUs overlap without this.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from mirror.base.dynamo import compiles_backward
from mirror.base.timeline import BACKWARD, CROSS
from mirror.base.torch_private import (
    ACCUMULATES,
    HIDES_ANOTHER,
    current_graph_task_id,
    functions_interpreter,
    has_post_accumulate_hooks,
    num_dispatch_modes,
)
from mirror.base.torch_private import hooks_of as hooks_of_tensor
from mirror.execution.replica_thread import ThreadState
from mirror.execution.run import current, push_context, save_context
from mirror.execution.runner import Runner
from mirror.replica.collectives.autograd_nodes import order
from mirror.replica.params.mirrored_tensor import MirroredTensor
from mirror.replica.params.replicated_param import ReplicaParameter
from mirror.threads.schedule import count_own_hooks
from mirror.values import PerReplica, map_structure

Node = Any
_KEY = "mirror.boundary"
_MAX_SHARED_NODES = 256  # in step 1, which runs in one thread
live_boundaries: weakref.WeakSet[Boundary] = weakref.WeakSet()
# By class of node, the function that returns the unpack hooks; see _unpack_hooks_getter.
_hook_getters: dict[type, Callable[[Node], Sequence[Any]] | None] = {}


class Boundary:
    """The metadata of a boundary's node: its runner, its replica, and the thread of forward."""

    __slots__ = ("__weakref__", "replica_id", "runner", "thread_id")

    def __init__(self, runner: Runner, replica_id: int) -> None:
        self.runner = weakref.ref(runner)
        self.replica_id = replica_id
        self.thread_id = threading.get_ident()
        live_boundaries.add(self)


def mark_boundary(runner: Runner, replica_ids: Iterable[int], parts: Sequence[Any]) -> list[Any]:
    """Returns views of the replicas' tensors, with boundaries where backward may be split.

    Args:
        parts: one value per replica; values that are no dense tensors with a graph are unchanged.
    """
    order.advance()  # the caller's next nodes join the replicas
    if len(parts) < 2 or not _starts_all_at_once(runner) or not torch.is_grad_enabled():
        return list(parts)
    return [_mark_boundary(runner, r, part) for r, part in zip(replica_ids, parts, strict=True)]


def mark_boundaries(runner: Runner, tree: Any) -> Any:
    """Returns a nested structure with ``mark_boundary`` applied to its PerReplica values."""
    order.advance()
    if not _starts_all_at_once(runner):
        return tree

    def mark(leaf: Any) -> Any:
        if not isinstance(leaf, PerReplica) or len(leaf.values) != runner.replicas.num_replicas:
            return leaf
        views = mark_boundary(runner, range(runner.replicas.num_replicas), leaf.values)
        return PerReplica(views, weights=leaf.weights)

    return map_structure(mark, tree)


def _starts_all_at_once(runner: Runner) -> bool:
    return runner.replicas.is_one_device and runner.starts_at_once


def _mark_boundary(runner: Runner, replica_id: int, part: Any) -> Any:
    if type(part) is not Tensor or not part.requires_grad or part.layout is not torch.strided:
        return part
    view = part.view_as(part)
    node: Any = view.grad_fn
    if node is None:  # a tracer or a transform hides the graph
        return part
    node.metadata[_KEY] = Boundary(runner, replica_id)
    return view


@dataclass(slots=True)
class SplitGraph:
    """A backward pass in two steps.

    Attributes:
        ends: the nodes of step 1, other than boundaries, where gradients accumulate.
        boundaries: by replica, the nodes where step 2 begins.
    """

    runner: Runner
    ends: list[Node]
    boundaries: dict[int, list[Node]]


def split_at_boundaries(outputs: Sequence[Any]) -> SplitGraph | None:
    """Returns the split of the pass from ``outputs``; ``None`` if it cannot be split."""
    if not all(isinstance(o, GradientEdge) or o.requires_grad for o in outputs):
        return None
    owners: dict[Node, int] = {}
    ends, boundaries = [], dict[Boundary, Node]()
    nodes = [o.node if isinstance(o, GradientEdge) else get_gradient_edge(o).node for o in outputs]
    while nodes:
        node = nodes.pop()
        if node in owners:
            continue
        owners[node] = CROSS
        if len(owners) > _MAX_SHARED_NODES:
            return None
        metadata: Any = node.metadata
        boundary = metadata.get(_KEY)
        if boundary is not None:
            boundaries[boundary] = node
            continue
        following = _next_nodes(node)
        nodes += following
        if not following:
            ends.append(node)
    runner = _free_runner(boundaries)
    if runner is None or not runner.schedule.may_go_backward_at_once():
        return None
    split = SplitGraph(runner, ends, {})
    for boundary, node in sorted(boundaries.items(), key=lambda item: item[0].replica_id):
        split.boundaries.setdefault(boundary.replica_id, []).append(node)
    if len(split.boundaries) < 2:
        return None
    for r, nodes_of_replica in split.boundaries.items():
        behind = [node for boundary in nodes_of_replica for node in _next_nodes(boundary)]
        if not _is_separate(runner, r, behind, owners):
            return None
    return split


def _free_runner(boundaries: Iterable[Boundary]) -> Runner | None:
    """Returns the common runner of the boundaries, if its threads can run for this thread."""
    runners = {(boundary.runner(), boundary.thread_id) for boundary in boundaries}
    if len(runners) != 1:
        return None
    ((runner, thread_id),) = runners
    if runner is None or thread_id != threading.get_ident():
        return None
    return runner if runner.is_free else None


def is_separate(runner: Runner, replica_id: int, outputs: Iterable[Tensor]) -> bool:
    """Whether the graph of a replica's outputs has no node that may concern another replica."""
    nodes = [output.grad_fn for output in outputs if output.grad_fn is not None]
    return _is_separate(runner, replica_id, nodes, {})


def _is_separate(
    runner: Runner, replica_id: int, nodes: list[Node], owners: dict[Node, int]
) -> bool:
    """Whether no other replica shares the graph of some nodes; records it in ``owners``."""
    while nodes:
        node = nodes.pop()
        owner = owners.get(node)
        if owner is None:
            if not _concerns_only(runner, replica_id, node):
                return False
            owners[node] = replica_id
            nodes += _next_nodes(node)
        elif owner != replica_id:
            return False
    return True


def _concerns_only(runner: Runner, replica_id: int, node: Node) -> bool:
    """Whether running a node affects only one replica."""
    kind = type(node)
    if kind not in _hook_getters:
        _hook_getters[kind] = _unpack_hooks_getter(kind)
    get_hooks = _hook_getters[kind]
    if get_hooks is None:
        # "auto" has the same bits either way, and these nodes need the GIL for most of a pass.
        return getattr(node, "mirror_is_separate", False) and not runner.schedule.keeps_order
    try:
        hooks = get_hooks(node)
    except (AttributeError, RuntimeError):  # an older torch, or a graph that was freed
        return False
    if hooks.count(None) < len(hooks):
        return False
    if kind.__name__ != ACCUMULATES:
        return True
    leaf = node.variable
    if isinstance(leaf, ReplicaParameter):
        variable = leaf.variable
        is_own = variable.replicas is runner.replicas and leaf.replica_id == replica_id
        return is_own and not variable.hooks
    if runner.schedule.keeps_order and (hooks_of_tensor(leaf) or has_post_accumulate_hooks(leaf)):
        return False
    return not isinstance(leaf, MirroredTensor)


def _unpack_hooks_getter(kind: type) -> Callable[[Node], Sequence[Any]] | None:
    """Returns a function of a node: the hooks that unpack its saved tensors.

    ``None`` if nodes of this class do not show them.
    """
    is_python = issubclass(kind, torch.autograd.function.BackwardCFunction)
    if is_python or kind.__name__ in HIDES_ANOTHER:
        return None
    names = [name for name in dir(kind) if name.startswith("_raw_saved_")]
    if not names:
        return lambda node: ()
    # attrgetter runs in C; the walk spends most of its time here. Two names at least, so that it
    # returns a tuple.
    of_tensors = attrgetter(*(f"{name}.unpack_hook" for name in names + names[:1]))
    saved_by = attrgetter(*names, names[0])

    def get_hooks(node: Node) -> Sequence[Any]:
        try:
            found: Sequence[Any] = of_tensors(node)
        except AttributeError:  # one of the attributes is a list of tensors
            lists = (one if isinstance(one, (tuple, list)) else (one,) for one in saved_by(node))
            found = [one.unpack_hook for one in chain(*lists) if one is not None]
        return found

    return get_hooks


def _next_nodes(node: Node) -> list[Node]:
    return [following for following, _ in node.next_functions if following is not None]


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
        sharers = 1 if self._runner.schedule.keeps_order else len(passes)
        state = ThreadState.capture(self._replicas, sharers, may_overlap=sharers > 1)
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
