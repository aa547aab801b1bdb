"""Plain variables that somebody trains beside a strategy: what tells of a forgotten scope.

[Note: Plain variables]
A variable that no strategy mirrors is one tensor for all replicas. Inside ``run`` every replica
would add its gradient to the one ``.grad``, and every replica's optimizer would step it: N
gradients summed, N steps for one. So a plain leaf that two replicas of one run train is an error.
What a single replica trains is its own, made inside ``run``; of that the user is told.

    where                   what is looked at
    a backward pass in run  the leaves of its graph, in the first passes from a place in the code:
                            the walk costs a microsecond a node, a steady step nothing
    a step in run           what the optimizer holds
    a step outside run      whether a strategy is there for nothing: its scope is open, or it has
                            been used and has nothing mirrored
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Sequence
from types import CodeType
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.optim import Optimizer

from mirror.errors import StrategyError
from mirror.execution.current_replica import current
from mirror.execution.lifecycle import LifecycleHooks, WhilePending
from mirror.execution.replicas import Replicas, RunView, WeakReplicaMap
from mirror.execution.run_state import Run
from mirror.execution.runner import runner_of
from mirror.replica.exactness.local_losses import LocalLosses
from mirror.replica.params.mirrored_tensor import MirroredTensor
from mirror.replica.params.pending_modules import PendingModules
from mirror.replica.params.replicated_param import ReplicaParameter
from mirror.replica.params.replicated_params import MirroredTensors
from mirror.threads.user_frames import warn_user

_PASSES = 3  # of a replica from one place in the code that are looked at
_PLACES = 1000  # in the code that are looked at
_NODES = 20_000  # of one graph

_told: weakref.WeakSet[Optimizer] = weakref.WeakSet()


class UnmirroredParams:
    """Notices the plain variables that a strategy's replicas train, or that are trained beside it.

    Attributes:
        replicas: those of the strategy.
        leaves: what the replicas of a run have trained of them.
        losses: what they have started backward passes from.
    """

    def __init__(
        self, replicas: Replicas, registry: MirroredTensors, recorded: PendingModules
    ) -> None:
        self.replicas = replicas
        self._registry, self._recorded = registry, recorded
        self._passes: dict[tuple[CodeType, int, int], int] = {}  # looked at; by place, replica
        self.losses = LocalLosses()
        self.leaves: weakref.WeakKeyDictionary[RunView, UnmirroredLeaves] = (
            weakref.WeakKeyDictionary()
        )
        self._unused = [replicas]  # until their first use
        self._has_told = self._has_leaves = False
        _by_replicas.put(replicas, self)

    def part(self) -> LifecycleHooks:
        """Returns what notes that the strategy is used, and tells of models made in a run."""
        prepare = WhilePending(self._unused, self.note_use)
        return LifecycleHooks(name="plain", prepare=prepare, finish=self._warn)

    def note_use(self) -> None:
        """Notes the first use of a strategy, if it has mirrored nothing yet."""
        self._unused.clear()
        if self.replicas.mirrors and not self._registry.has_owned:
            _used.add(self)

    @property
    def has_nothing(self) -> bool:
        """Whether there is a strategy, and nothing that it mirrors or is about to."""
        # What was made in its scope is mirrored at the next use.
        return not (self._registry.has_owned or self._recorded)

    @property
    def is_over(self) -> bool:
        """Whether this strategy is none that has been forgotten."""
        return runner_of(self.replicas).is_closed or self._registry.has_owned

    def looks_at(self, place: tuple[CodeType, int, int]) -> int:
        """Returns the number of a pass from a place in the code; 0 of one not to be looked at."""
        seen = self._passes.get(place, 0)
        if seen >= _PASSES or len(self._passes) >= _PLACES:
            return 0
        self._passes[place] = seen + 1
        return seen + 1

    def leaves_in(self, run: RunView) -> UnmirroredLeaves:
        """Returns what the replicas of a run have trained."""
        self._has_leaves = True
        return self.leaves.setdefault(run, UnmirroredLeaves())

    def _warn(self, run: Run) -> None:
        """Warns, once per strategy, of a model that a replica of the run has made and trained."""
        if not self._has_leaves or self._has_told:
            return
        leaves = self.leaves.get(run)
        if leaves is not None and leaves.has_stepped:
            self._has_told = True
            warn_user(
                "a model made inside strategy.run was trained there: every replica has one of its "
                "own, with its own gradients, which nothing reduces or keeps equal; make the "
                "model before, inside `with strategy.scope():`, or with strategy.mirror(model)"
            )


_used: weakref.WeakSet[UnmirroredParams] = weakref.WeakSet()  # when there was nothing mirrored
_by_replicas: WeakReplicaMap[UnmirroredParams] = WeakReplicaMap()
_plain_of = _by_replicas.get


class UnmirroredLeaves:
    """The plain leaves that the replicas of one run have trained, and which replica that was.

    Attributes:
        has_stepped: whether an optimizer has stepped parameters that are the replica's own.
    """

    __slots__ = ("_owners", "has_stepped")

    def __init__(self) -> None:
        self._owners: dict[int, tuple[Tensor, int]] = {}  # with the leaf: an id may be used again
        self.has_stepped = False

    def claim(self, leaves: Iterable[Tensor], replica_id: int, what: str) -> None:
        """Notes that a replica trains the leaves.

        Raises:
            StrategyError: another replica has trained one of them.
        """
        for leaf in leaves:
            _, owner = self._owners.setdefault(id(leaf), (leaf, replica_id))
            if owner != replica_id:
                kind = "parameter" if isinstance(leaf, nn.Parameter) else "tensor"
                raise StrategyError(
                    f"a {kind} of shape {tuple(leaf.shape)} that no strategy mirrors is trained "
                    f"by the replicas {owner} and {replica_id} of one strategy.run: {what}; make "
                    "its module inside `with strategy.scope():`, or mirror it before with "
                    "strategy.mirror(module)"
                )

    def claim_step(self, optimizer: Optimizer, replica_id: int) -> None:
        """Notes that a replica steps an optimizer whose parameters are plain.

        Raises:
            StrategyError: another replica has stepped one of the parameters.
        """
        parameters = [p for options in optimizer.param_groups for p in options["params"]]
        self.claim(parameters, replica_id, "they would be stepped once per replica")
        self.has_stepped |= any(
            isinstance(p, nn.Parameter) and not hasattr(p, "_copied_in_run") for p in parameters
        )


def note_pass(run: RunView, replica_id: int, args: Sequence[Any]) -> None:
    """Looks at what a backward pass of a replica starts from, and will accumulate into.

    Raises:
        StrategyError: into a plain leaf that another replica trains, too.
    """
    if len(run.active) < 2 and not run.replicas.workers.is_multi_process:
        return
    plain = _plain_of(run.replicas)
    caller = sys._getframe(4)  # of Tensor.backward, past torch.autograd.backward and our wrapper
    nth = plain.looks_at((caller.f_code, caller.f_lasti, replica_id))
    if not nth:
        return
    plain.losses.note(run, replica_id, (caller.f_code, caller.f_lasti), nth, args[0])
    if not run.replicas.weighted:
        return
    leaves = [
        leaf
        for leaf in leaves_of(args)
        if not isinstance(leaf, (ReplicaParameter, MirroredTensor))
    ]
    if leaves:
        plain.leaves_in(run).claim(
            leaves, replica_id, "their gradients would be added up, not averaged"
        )


def note_step(optimizer: Optimizer) -> None:
    """Looks at a step of an optimizer that holds nothing mirrored.

    Raises:
        StrategyError: inside ``run``, of what another replica has stepped, too.
    """
    replica = current.replica
    if replica is not None:
        if len(replica.run.active) > 1:
            leaves = _plain_of(replica.replicas).leaves_in(replica.run)
            leaves.claim_step(optimizer, replica.replica_id)
    elif (_used or current.strategy is not None) and optimizer not in _told:
        idle = _idle_strategy()
        if idle is not None and _trains_parameters(optimizer):
            _told.add(optimizer)
            warn_user(
                "the parameters of this optimizer are not mirrored: they train on one device, "
                f"and {idle} has no part in it; make the model inside `with strategy.scope():`, "
                "or mirror it with strategy.mirror(model)"
            )


def _idle_strategy() -> object:
    """Returns a strategy that is meant to train, and has nothing to."""
    strategy = current.strategy
    if strategy is not None and strategy.num_replicas_in_sync > 1:
        for plain in _by_replicas.all():
            if plain.replicas.strategy is strategy:
                return strategy if plain.has_nothing else None
    for plain in list(_used):
        if plain.is_over:
            _used.discard(plain)
        elif plain.has_nothing:
            return plain.replicas.strategy
    return None


def _trains_parameters(optimizer: Optimizer) -> bool:
    held = (p for options in optimizer.param_groups for p in options["params"])
    return any(isinstance(p, nn.Parameter) and p.requires_grad for p in held)


def leaves_of(args: Sequence[Any]) -> list[Tensor]:
    """Returns the leaves that a backward pass accumulates into; of a huge graph, some.

    Not a leaf that replicas have slices of: the input, whose gradient is each one's own part.

    Args:
        args: of the function that starts the engine.
    """
    inputs = args[4] if len(args) > 4 else ()
    return [leaf for leaf in inputs if isinstance(leaf, Tensor)] or _of_graph(args[0])


def _of_graph(outputs: Sequence[Any]) -> list[Tensor]:
    leaves, seen = [], set[Any]()
    nodes: list[Any] = [o.node if isinstance(o, GradientEdge) else o.grad_fn for o in outputs]
    while nodes and len(seen) < _NODES:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = _leaf_of(node)
        if leaf is not None:
            leaves.append(leaf)
        following = [n for n, _ in node.next_functions]
        if type(node).__name__ == "SliceBackward0":
            following = [n for n in following if not _is_of_input(n)]
        nodes += following
    return leaves


def _is_of_input(node: Any) -> bool:
    leaf = _leaf_of(node)
    return leaf is not None and not isinstance(leaf, nn.Parameter)


def _leaf_of(node: Any) -> Tensor | None:
    """Returns the leaf that a node accumulates into.

    By its class: a custom function's node has attributes of the user's, whatever their names.
    """
    return node.variable if type(node).__name__ == "AccumulateGrad" else None
