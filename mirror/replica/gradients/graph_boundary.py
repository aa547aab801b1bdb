"""Seams: where the replicas' graphs are joined, and backward passes that come apart there.

[Note: Seams]
Outside ``run`` one backward pass goes through the graphs of all replicas in one thread. What joins
the replicas' tensors there (a split call, ``reduce``, ``gather``) therefore takes a view of each,
whose node, the seam, carries the replica's index. Nobody else holds that view, so the seam has no
hooks. A pass that reaches seams is run in two steps:

    loss -> cat -+-> seam -> graph of replica 0     1. down to the seams, in the calling thread
                 +-> seam -> graph of replica 1     2. beyond them, in the replicas' threads

A walk over the nodes shows first that the graphs beyond the seams have no node in common, with
each other or with step 1, and that nothing in them may concern another replica:

    a node written in Python            collectives, compiled code, checkpointing with reentrance;
                                        it needs the GIL anyway
    saved tensors unpacked by a hook    checkpointing: it sets the state of the random generator
    a node that hides what it saves     maybe the same
    a parameter with hooks              they see the reduced gradient when the pass ends

Else the pass is run as it is. Each replica's nodes run in the order in which one pass would run
them: gradients have the bits that one pass on as many intra-op threads gives.

A hook of a tensor may ask for a gradient, which merges the replicas: it waits until the others
have ended, or wait there too, and from then on goes alone. A hook of several tensors
(``register_multi_grad_hook``) is called for each part of the pass, with what that part has.

Simulated devices alone have seams, where runs start all at once, see [Note: Turns], or where
"auto" has found such passes faster, see [Note: Measured manners]. There they come apart only while
the program makes no hooks, which would be called in another order. GPUs work beside each other
anyway.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from mirror.base.timeline import CROSS
from mirror.base.torch_private import ACCUMULATES, HIDES_ANOTHER, has_post_accumulate_hooks
from mirror.base.torch_private import hooks_of as hooks_of_tensor
from mirror.execution.runner import Runner
from mirror.replica.params.mirrored_tensor import MirroredTensor
from mirror.replica.params.replicated_param import ReplicaParameter
from mirror.values import PerReplica, map_structure

Node = Any
_KEY = "mirror.seam"
_MOST_NODES = 256  # of step 1: what it holds runs in one thread
live_seams: weakref.WeakSet[Boundary] = weakref.WeakSet()
_hooks_of: dict[type, Callable[[Node], Sequence[Any]] | None] = {}  # by kind; see _unpacking


class Boundary:
    """What the node of a seam carries."""

    __slots__ = ("__weakref__", "replica_id", "runner", "thread_id")

    def __init__(self, runner: Runner, replica_id: int) -> None:
        self.runner = weakref.ref(runner)
        self.replica_id = replica_id
        self.thread_id = threading.get_ident()
        live_seams.add(self)


def mark_boundary(runner: Runner, replica_ids: Iterable[int], parts: Sequence[Any]) -> list[Any]:
    """Returns views of the replicas' parts with seams, where backward passes may come apart."""
    if len(parts) < 2 or not _starts_all_at_once(runner) or not torch.is_grad_enabled():
        return list(parts)
    return [_mark_boundary(runner, r, part) for r, part in zip(replica_ids, parts, strict=True)]


def mark_boundaries(runner: Runner, tree: Any) -> Any:
    """Returns a structure with the parts of its PerReplica values ``mark_boundary``."""
    if not _starts_all_at_once(runner):
        return tree

    def sew(leaf: Any) -> Any:
        if not isinstance(leaf, PerReplica) or len(leaf.values) != runner.replicas.num_replicas:
            return leaf
        views = mark_boundary(runner, range(runner.replicas.num_replicas), leaf.values)
        return PerReplica(views, weights=leaf.weights)

    return map_structure(sew, tree)


def _starts_all_at_once(runner: Runner) -> bool:
    return runner.replicas.is_one_device and runner.starts_at_once


def _mark_boundary(runner: Runner, replica_id: int, part: Any) -> Any:
    if type(part) is not Tensor or not part.requires_grad or part.layout is not torch.strided:
        return part
    view = part.view_as(part)
    seam: Any = view.grad_fn
    if seam is None:  # something follows the thread
        return part
    seam.metadata[_KEY] = Boundary(runner, replica_id)
    return view


@dataclass(slots=True)
class SplitGraph:
    """What a pass comes apart into.

    Attributes:
        ends: the nodes of step 1 where it ends but for the seams: it accumulates there.
        seams: those of each replica.
    """

    runner: Runner
    ends: list[Node]
    seams: dict[int, list[Node]]


def split_at_boundaries(outputs: Sequence[Any]) -> SplitGraph | None:
    """Returns what the pass from ``outputs`` comes apart into, ``None`` where it does not."""
    if not all(isinstance(o, GradientEdge) or o.requires_grad for o in outputs):
        return None
    owners: dict[Node, int] = {}
    ends, seams = [], dict[Boundary, Node]()
    nodes = [o.node if isinstance(o, GradientEdge) else get_gradient_edge(o).node for o in outputs]
    while nodes:
        node = nodes.pop()
        if node in owners:
            continue
        owners[node] = CROSS
        if len(owners) > _MOST_NODES:
            return None
        metadata: Any = node.metadata
        seam = metadata.get(_KEY)
        if seam is not None:
            seams[seam] = node
            continue
        following = _following(node)
        nodes += following
        if not following:
            ends.append(node)
    runner = _runner_of(seams)
    if runner is None or not runner.schedule.may_go_backward_at_once():
        return None
    parts = SplitGraph(runner, ends, {})
    for seam, node in sorted(seams.items(), key=lambda item: item[0].replica_id):
        parts.seams.setdefault(seam.replica_id, []).append(node)
    if len(parts.seams) < 2:
        return None
    for r, mine in parts.seams.items():
        if not _is_apart(runner, r, mine, owners):
            return None
    return parts


def _runner_of(seams: Iterable[Boundary]) -> Runner | None:
    """Returns the runner of all seams, if its threads are free for this one."""
    runners = {(seam.runner(), seam.thread_id) for seam in seams}
    if len(runners) != 1:
        return None
    ((runner, thread_id),) = runners
    if runner is None or thread_id != threading.get_ident():
        return None
    return runner if runner.is_free else None


def _is_apart(
    runner: Runner, replica_id: int, seams: Iterable[Node], owners: dict[Node, int]
) -> bool:
    """Whether the graph beyond one replica's seams is its own; notes its nodes in ``owners``."""
    nodes = [node for seam in seams for node in _following(seam)]
    while nodes:
        node = nodes.pop()
        owner = owners.get(node)
        if owner is None:
            if not _concerns_only(runner, replica_id, node):
                return False
            owners[node] = replica_id
            nodes += _following(node)
        elif owner != replica_id:
            return False
    return True


def _concerns_only(runner: Runner, replica_id: int, node: Node) -> bool:
    """Whether what a node does concerns no replica but one."""
    kind = type(node)
    if kind not in _hooks_of:
        _hooks_of[kind] = _unpacking(kind)
    hooks_of = _hooks_of[kind]
    if hooks_of is None:
        return False
    try:
        hooks = hooks_of(node)
    except (AttributeError, RuntimeError):  # an older torch does not tell; the graph is freed
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


def _unpacking(kind: type) -> Callable[[Node], Sequence[Any]] | None:
    """Returns what tells the hooks that unpack a node's saved tensors; ``None``: nothing does."""
    is_python = issubclass(kind, torch.autograd.function.BackwardCFunction)
    if is_python or kind.__name__ in HIDES_ANOTHER:
        return None
    names = [name for name in dir(kind) if name.startswith("_raw_saved_")]
    if not names:
        return lambda node: ()
    # Two at least, for a tuple; in C, as this takes most of the walk.
    of_tensors = attrgetter(*(f"{name}.unpack_hook" for name in names + names[:1]))
    saved_by = attrgetter(*names, names[0])

    def hooks_of(node: Node) -> Sequence[Any]:
        try:
            found: Sequence[Any] = of_tensors(node)
        except AttributeError:  # a list of tensors among them
            lists = (one if isinstance(one, (tuple, list)) else (one,) for one in saved_by(node))
            found = [one.unpack_hook for one in chain(*lists) if one is not None]
        return found

    return hooks_of


def _following(node: Node) -> list[Node]:
    return [following for following, _ in node.next_functions if following is not None]
