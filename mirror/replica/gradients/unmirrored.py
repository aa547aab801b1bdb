"""Unmirrored parameters that are trained while a strategy exists: signs of a forgotten scope.

A variable that no strategy mirrors is one tensor for all replicas. Inside ``run`` every replica
would add its gradient to the same ``.grad``, and every replica's optimizer would step it: the sum
of N gradients, and N steps instead of one. So training an unmirrored leaf by two replicas of one
run raises StrategyError. A leaf that only one replica trains was created inside ``run``; for that
a warning is issued.

    occasion                check
    a backward pass in run  the leaves of its graph, in the first passes from one line of code:
                            the walk costs a microsecond per node, later passes cost nothing
    a step in run           the optimizer's parameters
    a step outside run      whether a strategy has nothing to do: its scope is open, or it was
                            used, and it mirrors nothing
    the end of a block          whether an optimizer has stepped inside, and the strategy itself
    ``with strategy:``          was not used: its scope was meant
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from types import CodeType
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.optim import Optimizer

from mirror.base.process_bound import WeakRegistry
from mirror.base.torch_private import ACCUMULATES
from mirror.errors import StrategyError
from mirror.execution.lifecycle import LifecycleHooks, WhilePending
from mirror.execution.replicas import Replicas, WeakReplicaMap
from mirror.execution.run import Run, current
from mirror.execution.runner import runner_of
from mirror.replica.exactness.local_losses import LocalLosses
from mirror.replica.params.mirrored_tensor import MirroredTensor
from mirror.replica.params.replicated_param import ReplicaParameter
from mirror.replica.params.replicated_params import MirroredTensors
from mirror.threads.user_frames import warn_user

_MAX_PASSES = 3  # that are checked, of one replica and one call site
_MAX_CALL_SITES = 1000  # that are checked
CallSite = tuple[CodeType, int, int]  # code, instruction and replica
_MAX_NODES = 20_000  # that are visited, of one graph

_warned: weakref.WeakSet[Optimizer] = weakref.WeakSet()


class UnmirroredParams:
    """Detects unmirrored variables that a strategy's replicas train, or that train outside it.

    Attributes:
        replicas: the strategy's replicas.
        leaves: by run, the unmirrored leaves that its replicas have trained.
        losses: the losses from which they have started backward passes.
        passes: the number of checked passes, by call site.
        checked: the call sites whose further passes are not checked.

    Args:
        recorded: true while modules wait to be mirrored at the next use.
    """

    def __init__(self, replicas: Replicas, registry: MirroredTensors, recorded: object) -> None:
        self.replicas = replicas
        self._registry, self._recorded = registry, recorded
        self.passes: dict[CallSite, int] = {}
        self.checked = set[CallSite]()
        self.losses = LocalLosses()
        self.leaves: weakref.WeakKeyDictionary[Run, UnmirroredLeaves] = weakref.WeakKeyDictionary()
        self._unused = [replicas]  # until their first use
        self._has_warned = self._has_stepped_beside = False
        self._reference = weakref.ref(self)
        _by_replicas.put(replicas, self)

    def part(self) -> LifecycleHooks:
        """Returns the hooks that record the strategy's use and warn of models made in a run."""
        prepare = WhilePending(self._unused, self.record_use)
        finish = WhilePending(self.leaves, self._warn)
        return LifecycleHooks(name="plain", prepare=prepare, finish=finish)

    def record_use(self) -> None:
        """Records the first use of a strategy, if it has mirrored nothing yet."""
        self._unused.clear()
        self.forget_block()
        if self.replicas.mirrors and not self._registry.has_owned:
            _used.add(self)

    def enter_block(self) -> None:
        """Watches for steps beside the strategy, until its first use or the end."""
        if self.replicas.mirrors and self._unused:
            _blocks.append(self._reference)

    def leave_block(self, *, warns: bool) -> None:
        """Warns if an optimizer has stepped in the block, and the strategy was not used."""
        if self.forget_block() and warns and self._has_stepped_beside and self.has_nothing:
            warn_user(
                "`with strategy:` closes the strategy at its end, and does nothing else: a model "
                "was trained inside on one device, and the strategy was not used; write "
                "`with strategy.scope():` around the model and its training"
            )

    def forget_block(self) -> bool:
        """Ends the watch for steps; returns whether there was one."""
        if self._reference not in _blocks:
            return False
        _blocks.remove(self._reference)
        return True

    def record_step_beside(self) -> None:
        """Records that an optimizer has stepped parameters that no strategy mirrors."""
        self._has_stepped_beside = True

    @property
    def has_nothing(self) -> bool:
        """Whether the strategy mirrors nothing, now or at its next use."""
        return not (self._registry.has_owned or self._recorded)

    @property
    def is_over(self) -> bool:
        """Whether warnings for this strategy end: it is closed, or has mirrored something."""
        return runner_of(self.replicas).is_closed or self._registry.has_owned

    def check_pass(self, run: Run, place: CallSite, args: Sequence[Any]) -> None:
        """Checks the loss of a replica's backward pass, and the leaves that it accumulates into.

        Args:
            place: the call of ``backward``.
            args: the arguments of the function that starts the engine.

        Raises:
            StrategyError: another replica trains one of the leaves too, and it is not mirrored.
        """
        if len(run.active) < 2 and not run.replicas.workers.is_multi_process:
            return
        if len(self.passes) >= _MAX_CALL_SITES:
            return
        *code, replica_id = place
        self.passes[place] = nth = self.passes.get(place, 0) + 1
        if nth == _MAX_PASSES:
            self.checked.add(place)
        self.losses.record(run, replica_id, tuple(code), nth, args[0])
        if not run.replicas.weighted:
            return
        leaves = [
            leaf
            for leaf in leaves_of_pass(args)
            if not isinstance(leaf, (ReplicaParameter, MirroredTensor))
        ]
        if leaves:
            self.leaves_in(run).claim(
                leaves, replica_id, "their gradients would be added up, not averaged"
            )

    def leaves_in(self, run: Run) -> UnmirroredLeaves:
        """Returns the unmirrored leaves that the replicas of a run have trained."""
        return self.leaves.setdefault(run, UnmirroredLeaves())

    def _warn(self, run: Run) -> None:
        """Warns once per strategy if a replica of the run has made and trained a model."""
        if self._has_warned:
            return
        leaves = self.leaves.get(run)
        if leaves is not None and leaves.has_stepped:
            self._has_warned = True
            warn_user(
                "a model made inside strategy.run was trained there: every replica has one of its "
                "own, with its own gradients, which nothing reduces or keeps equal; make the "
                "model before, inside `with strategy.scope():`, or with strategy.mirror(model)"
            )


_used: WeakRegistry[UnmirroredParams] = WeakRegistry()  # used with nothing mirrored
# Entered by ``with strategy:``, and not used since. A list, because every step asks whether there
# is one.
_blocks: list[weakref.ref[UnmirroredParams]] = []
_by_replicas: WeakReplicaMap[UnmirroredParams] = WeakReplicaMap()
_unmirrored_of = _by_replicas.get


class UnmirroredLeaves:
    """The unmirrored leaves that the replicas of one run have trained, each by one replica.

    Attributes:
        has_stepped: whether an optimizer has stepped parameters that a replica has created.
    """

    __slots__ = ("_owners", "has_stepped")

    def __init__(self) -> None:
        # By id; the tensor is kept so that its id is not reused.
        self._owners: dict[int, tuple[Tensor, int]] = {}
        self.has_stepped = False

    def claim(self, leaves: Iterable[Tensor], replica_id: int, what: str) -> None:
        """Records that a replica trains the leaves.

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
        """Records that a replica steps an optimizer over unmirrored parameters.

        Raises:
            StrategyError: another replica has stepped one of the parameters.
        """
        parameters = [p for options in optimizer.param_groups for p in options["params"]]
        self.claim(parameters, replica_id, "they would be stepped once per replica")
        self.has_stepped |= any(
            isinstance(p, nn.Parameter) and not hasattr(p, "_copied_in_run") for p in parameters
        )


def check_step(optimizer: Optimizer) -> None:
    """Checks a step of an optimizer that holds nothing mirrored; outside ``run`` it may warn.

    Raises:
        StrategyError: inside ``run``, if another replica has stepped the same parameters.
    """
    replica = current.replica
    if replica is not None:
        if len(replica.run.active) > 1:
            leaves = _unmirrored_of(replica.replicas).leaves_in(replica.run)
            leaves.claim_step(optimizer, replica.replica_id)
        return
    if _blocks and _trains_parameters(optimizer):
        for reference in tuple(_blocks):
            if (unmirrored := reference()) is not None:
                unmirrored.record_step_beside()
    if (_used or current.strategy is not None) and optimizer not in _warned:
        idle = _idle_strategy()
        if idle is not None and _trains_parameters(optimizer):
            _warned.add(optimizer)
            warn_user(
                "the parameters of this optimizer are not mirrored: they train on one device, "
                f"and {idle} has no part in it; make the model inside `with strategy.scope():`, "
                "or mirror it with strategy.mirror(model)"
            )


def _idle_strategy() -> object:
    """Returns a strategy that is in use and mirrors nothing; ``None`` if there is none."""
    strategy = current.strategy
    if strategy is not None:
        if strategy.num_replicas_in_sync == 1:
            return None  # its parameters are ordinary ones
        for unmirrored in _by_replicas.all():
            if unmirrored.replicas.strategy is strategy:
                return strategy if unmirrored.has_nothing else None
    for unmirrored in _used:
        if unmirrored.is_over:
            _used.discard(unmirrored)
        elif unmirrored.has_nothing:
            return unmirrored.replicas.strategy
    return None


def _trains_parameters(optimizer: Optimizer) -> bool:
    held = (p for options in optimizer.param_groups for p in options["params"])
    return any(isinstance(p, nn.Parameter) and p.requires_grad for p in held)


def leaves_of_pass(args: Sequence[Any]) -> list[Tensor]:
    """Returns the leaves that a backward pass accumulates into; of a huge graph, some of them.

    Leaves of which replicas have slices are left out: these are inputs, and each replica's slice
    has its own gradient.

    Args:
        args: the arguments of the function that starts the engine.
    """
    inputs = args[4] if len(args) > 4 else ()
    return [leaf for leaf in inputs if isinstance(leaf, Tensor)] or _leaves_of_graph(args[0])


def _leaves_of_graph(outputs: Sequence[Any]) -> list[Tensor]:
    leaves, seen = [], set[Any]()
    nodes: list[Any] = [o.node if isinstance(o, GradientEdge) else o.grad_fn for o in outputs]
    while nodes and len(seen) < _MAX_NODES:
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
    """Returns the leaf that a node accumulates into; ``None`` for other nodes.

    The class decides, not ``hasattr``: users may set any attribute on a custom function's node.
    """
    return node.variable if type(node).__name__ == ACCUMULATES else None
