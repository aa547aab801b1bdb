"""Run: one call of ``run``, its replicas, and the replica that is current in a thread.

    Run        one call of ``run``: the replicas that take part, their merges and their weights
    Replica    one replica of a run, while its function runs
    current    the stack of contexts of the calling thread; its top is a replica, or a strategy

A context is a strategy in its cross-replica context (its scope, or a merge) or one of its
replicas. If the stack is empty, no strategy is current.

[Note: Interrupts]
Problem: Ctrl-C, like any exception thrown into a thread, comes at the start or the return of a
function, never between instructions that call nothing. It may come before the ``try``, or inside
the code that leaves a context.
Rule:    the old state is fetched before ``try``; the new state is entered inside it
         ``finally`` restores it by plain assignments in the same frame, without a call
         where calls are needed, a flag is set before and cleared after; the next user of a
         flagged object recovers it
        before = save_context()
        try:
            push_context(strategy, replica)
        finally:
            current.replica, current.strategy, current.below = before
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
from torch import Tensor

from mirror.base.dynamo import resume_dynamo, suspend_dynamo
from mirror.base.timeline import CROSS, WAITING, Timeline, latest_timeline
from mirror.device.device_mesh import DeviceRemap
from mirror.device.streams import ReplicaStreams
from mirror.errors import StrategyError, short_repr
from mirror.execution.replicas import Replicas
from mirror.execution.swapped_state import RngPool, SwappedState
from mirror.threads.lockstep import Lockstep
from mirror.threads.merge_point import Action, MergePoint, NullLockstep, Payloads
from mirror.values import ExampleCounts, GivenWeights


class SwappedOptimizer(Protocol):
    """An optimizer that the step of one replica uses exclusively, with its parameters swapped."""

    def swap_out(self) -> None:
        """Swaps the replica's parameters out; idempotent."""

    def force_out(self) -> None:
        """Swaps out after a failure, whichever replica uses or waits for it; idempotent."""


class SteppedOptimizer(NamedTuple):
    """An optimizer that all replicas of a run have stepped.

    Attributes:
        read_options: returns the options of its groups, at the end of a replica's function.
        check: called with ``left`` at the end of the run; raises StrategyError if they differ.
        left: these options, by replica id.
    """

    read_options: Callable[[], object]
    check: Callable[[dict[int, Any]], None]
    left: dict[int, object]


class SharedTensors(Protocol):
    """Ordinary tensors, one for all replicas, that the code of a run may change."""

    def record_changes(self, replica_id: int) -> None:
        """Records which of them a replica has changed, after a piece of its code."""


class Tracing(Protocol):
    """The tracer of a compiled step: one trace stands for all replicas.

    Traced tensors have no values and belong to no replica. Code that would wait for other
    replicas, or read values that differ between them, calls the tracer instead.
    """

    def all_reduce(self, op: str, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Returns placeholders for the tensors reduced over the replicas; differentiable."""

    @property
    def count(self) -> Tensor:
        """The number of replicas that take part, a 0-d tensor in double precision."""

    def own_row(self, row: Tensor) -> Tensor:
        """Returns zeros with one row per replica, in which this replica's row is ``row``."""

    def set_weight(self, value: Any) -> None:
        """Sets the weight of the replica, a tensor or a number, from now on."""

    def use_scaler(self, scaler: Any, tensors: Sequence[Tensor | None]) -> None:
        """Makes tensors of a gradient scaler inputs, which the step may write."""

    def update(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Has the optimizer step uncompiled, between two programs."""

    def skip_step_if(self, skipped: Tensor, optimizer: torch.optim.Optimizer) -> None:
        """Makes the optimizer's next step change nothing where ``skipped`` is true."""

    def run_uncompiled(self) -> NoReturn:
        """Has calls with these sizes run uncompiled: a value must be checked."""

    def refuse(self, what: str, remedy: str) -> NoReturn:
        """Raises the error for code that cannot be traced."""


class Replica:
    """One replica while its function runs; ``current.replica`` is one.

    Attributes:
        run: the run that it takes part in.
        device: holds its variables.
        weight: its weight in the gradient mean and in ``strategy.reduce("mean", ...)``.
        lent: the optimizers that its step uses.
        has_begun: whether its function has been called.
        context: its ``ReplicaContext``, created when the user first asks for it.
        tracing: the tracer of its code, while a step is compiled.
    """

    __slots__ = (
        *("context", "device", "has_begun", "lent", "replica_id", "replicas", "run"),
        *("tracing", "weight"),
    )

    def __init__(self, replicas: Replicas, run: Run, replica_id: int, weight: float) -> None:
        self.replicas = replicas
        self.run = run
        self.replica_id = replica_id
        self.device = replicas.devices[replica_id]
        self.weight = weight
        self.lent: list[SwappedOptimizer] = []
        self.has_begun = False
        self.context: Any = None
        self.tracing: Tracing | None = None

    def give_back(self) -> None:
        """Swaps out the optimizers of a step that raised."""
        while self.lent:
            self.lent[-1].swap_out()
            self.lent.pop()


class Unverifiable(Exception):
    """A trial of a call cannot be made; the message says why. See [Note: Trials]."""


class Run:
    """The state that the replicas of one call of ``run`` share.

    Attributes:
        active: the ids of the replicas that take part.
        members: the active replicas by id.
        outer: the run that has started this one in a merge, if any.
        results: the function's results by replica id.
        counts: the number of examples of each replica, if the batch was split.
        is_given: whether the program has set weights.
        is_weighted: whether the replicas have explicit weights.
        is_default: whether this is the run of code without a strategy.
        has_stepped: whether an optimizer has stepped, here or in a nested run; set on outermost
            runs only.
        is_split: whether this is the run of a split call, written for the whole batch.
        is_trial: whether it leaves no trace. See [Note: Trials] in ``modules/verified_calls.py``.
        is_left: whether an interrupt of the outer run has abandoned this one.
        assigned: mirrored variables that replicas have assigned; True if values, not just flags.
        checks: the ``on_merge`` hooks.
        modes: the train() and eval() modes that replicas have set, by ``id`` of the module.
        stepped: the optimizers that all replicas have stepped, with the options of each replica
            that has returned.
        swapped: what each replica has for itself while they take turns: random streams, and the
            modes and flags that a replica has set; ``None`` while they may overlap.
        shared: ordinary tensors, one for all replicas; changes of them are recorded.
    """

    __slots__ = (
        *("__weakref__", "_on_streams", "active", "assigned", "checks", "counts", "depth"),
        *("has_stepped", "is_default", "is_given", "is_left", "is_split", "is_trial"),
        *("is_weighted",),
        *("lockstep", "members", "modes", "outer", "replicas", "results", "stepped"),
        *("shared", "swapped"),
    )

    def __init__(
        self,
        replicas: Replicas,
        lockstep: Lockstep | NullLockstep,
        active: tuple[int, ...],
        weights: Sequence[float] | None = None,
        outer: Run | None = None,
        *,
        swapped: SwappedState | None = None,
        checks: Sequence[Callable[[Run], None]] = (),
        is_default: bool = False,
    ) -> None:
        self.replicas = replicas
        self.lockstep = lockstep
        self.active = active
        self.results: dict[int, Any] = {}
        self.is_weighted = weights is not None
        self.is_given = type(weights) is GivenWeights
        # As counts_of has it, without a call in every run.
        self.counts: Sequence[float] | None = weights if type(weights) is ExampleCounts else None
        if type(weights) is GivenWeights:
            self.counts = weights.counts
        self.is_default = is_default
        self.is_left = self.is_split = self.is_trial = self.has_stepped = False
        self.outer = outer
        self.depth: int = 0 if outer is None else outer.depth + 1
        self.checks = checks
        self.assigned: dict[Any, bool] = {}
        self.modes: dict[int, tuple[object, dict[int, bool]]] = {}
        self.stepped: dict[object, SteppedOptimizer] = {}
        self.swapped = swapped
        self.shared: Sequence[SharedTensors] = ()
        self._on_streams = (
            None if replicas.are_simulated else ReplicaStreams(replicas.mesh.replicas)
        )
        self.members: dict[int, Replica] = {}
        for r in active:
            weight = 1.0 if weights is None else float(weights[r])
            self.members[r] = Replica(replicas, self, r, weight)

    def shares(self) -> dict[int, float]:
        """Returns the share of each replica's gradient. See [Note: Shares]."""
        return shares_of(self.weights(), weighted=self.replicas.weighted)

    def weights(self) -> dict[int, float]:
        """Returns the active replicas' weights by replica id."""
        weights = dict[int, float]()
        for r, replica in self.members.items():
            weights[r] = replica.weight
        return weights

    def total_weight(self) -> float:
        """Returns the sum of the active replicas' weights."""
        if not self.is_weighted:
            return float(len(self.active))
        return float(sum(self.weights().values()))

    def all_weights(self) -> Sequence[float] | None:
        """Returns the weights of all replicas, 0 for idle ones; ``None`` if there are none."""
        if not self.is_weighted:
            return None
        found = [0.0] * self.replicas.num_replicas
        for r, replica in self.members.items():
            found[r] = replica.weight
        if self.is_given:
            return GivenWeights.for_counts(found, self.counts)
        return found if self.counts is None else ExampleCounts(found)

    def set_weight(self, replica_id: int, weight: float) -> None:
        """Sets the weight of a replica from now on."""
        self.members[replica_id].weight = weight
        self.is_weighted = self.is_given = True

    def is_or_has_within(self, running: Run | None) -> bool:
        """Whether ``running`` is this run, or nested in it."""
        while running is not None and running is not self:
            running = running.outer
        return running is not None

    def merge(self, replica_id: int, point: MergePoint) -> Any:
        """Merges the replicas of this run; the action runs in the cross-replica context."""
        replica = self.members[replica_id]
        if current.replica is not replica:
            check_current(replica)
        if replica.lent:
            if current.stepping:
                raise StrategyError(
                    f"{point} was called inside optimizer.step, where every replica steps alone; "
                    "call it before the step"
                )
            replica.give_back()
        for tensors in self.shared:
            tensors.record_changes(replica_id)
        if self._on_streams is not None:
            self._on_streams.record(replica_id)
        timeline = self.replicas.timeline
        dynamo_callback = suspend_dynamo()  # actions are not the user's code
        timeline.mark((timeline.clock(), replica_id, WAITING, point.operation))
        try:
            result = (
                self.act(point.action, {replica_id: point.payload})[replica_id]
                if self.is_default  # there is no other replica
                else self.lockstep.merge(replica_id, point)
            )
        except Exception:  # the replica may handle it and continue
            self.swap_in(replica_id)
            raise
        else:
            if self.swapped is not None and self.swapped.inside != replica_id:
                self.swapped.enter(replica_id)
            return result
        finally:
            timeline.mark((timeline.clock(), replica_id, WAITING, None))
            resume_dynamo(dynamo_callback)

    def wait_for_turn(self, replica_id: int) -> None:
        """Waits until the calling replica may go on, if ``let_next_begin`` has returned True."""
        self.replicas.timeline.begin(replica_id, WAITING)
        try:
            self.lockstep.wait_for_turn(replica_id)
        finally:
            self.replicas.timeline.end(replica_id, WAITING)

    def act(self, action: Action, payloads: Payloads) -> Payloads:
        """Runs the action of a merge point, in the cross-replica context."""
        if self.modes or self.assigned:
            self._check()
        before = current.replica, current.strategy, current.below
        try:
            current.below = before
            current.replica, current.strategy = None, self.replicas.strategy
            if self._on_streams is None:
                return action(payloads)
            with self._on_streams.make_caller_wait():
                return action(payloads)
        finally:
            current.replica, current.strategy, current.below = before
            if self._on_streams is not None:
                self._on_streams.forget()

    def take_turns(self, replica_id: int) -> SwappedState | None:
        """Makes the replicas take turns from here on; waits for the turn of the calling one.

        Returns:
            What each replica has for itself from now on; the calling one's is swapped in. ``None``
            if the others do not move, so that they may wait for the calling one.
        """
        if self.swapped is None:
            if not self.lockstep.take_turns(replica_id):
                return None
            if self.swapped is None:
                self.swapped = RngPool(self.replicas.devices).begin(self.active)
        self.swap_in(replica_id)
        return self.swapped

    def swap_in(self, replica_id: int) -> None:
        """Swaps in the random streams, modes and flags of a replica, which has the turn."""
        if self.swapped is not None and self.swapped.inside != replica_id:
            self.swapped.enter(replica_id)

    def swap_in_first(self) -> None:
        """Makes a merge draw from the first replica's stream, as one device would."""
        if self.swapped is not None:
            self.swapped.enter_first()

    def _check(self) -> None:
        if self.modes:
            self.check_modes()
        for check in self.checks:
            check(self)

    def check_options(self) -> None:
        """Raises StrategyError if the replicas have left other options of an optimizer each."""
        while self.stepped:
            _, stepped = self.stepped.popitem()
            if stepped.left:
                stepped.check(stepped.left)

    def check_modes(self) -> None:
        """Raises StrategyError if only some replicas have changed a module's mode."""
        modes, self.modes = self.modes, {}
        for module, of_replicas in modes.values():
            if len(of_replicas) < len(self.active) or len(set(of_replicas.values())) > 1:
                called = ", ".join(
                    f"replica {r} called {'train' if mode else 'eval'}()"
                    for r, mode in of_replicas.items()
                )
                raise StrategyError(
                    f"the mode of a {type(module).__name__} must be equal on all replicas, but "
                    f"not all have set the same: {called}; call train() and eval() outside "
                    "strategy.run, or on every replica"
                )


def check_weight(value: Any) -> float:
    """Returns a weight as a number; raises ValueError unless it is one, finite, and >= 0."""
    try:
        # float() would also read a string.
        weight = math.nan if isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError, RuntimeError):
        weight = math.nan
    if not math.isfinite(weight) or weight < 0:
        raise ValueError(f"a replica's weight is one finite number >= 0; got {short_repr(value)}")
    return weight


def shares_of(
    weights: Mapping[int, float],
    *,
    weighted: bool,
    count: int | None = None,
    total: float | None = None,
) -> dict[int, float]:
    """Returns the shares of the gradients of replicas with these weights. See [Note: Shares].

    Args:
        weighted: whether gradients are weighted means, or plain sums.
        count: the number of all replicas, if there are more than these.
        total: the sum of the weights of all replicas.
    """
    if not weighted:
        return dict.fromkeys(weights, 1.0)
    total = sum(weights.values()) if total is None else total
    if total == 0:  # as on one device: the mean over no examples
        return dict.fromkeys(weights, 1.0 / (count or len(weights)))
    shares = dict[int, float]()
    for r, weight in weights.items():
        shares[r] = weight / total
    return shares


def recomputing(replicas: Replicas, replica_id: int) -> Replica:
    """Returns a replica for the recomputation of its forward in a backward pass."""
    return Run(replicas, NullLockstep(), (replica_id,)).members[replica_id]


def is_recomputing(replica: Replica) -> bool:
    """Whether the replica only recomputes its forward in a backward pass outside ``run``."""
    return isinstance(replica.run.lockstep, NullLockstep) and replica.tracing is None


Context = tuple["Replica | None", Any, Any]  # a replica, a strategy, and the context below


class _Current(threading.local):
    """The top context of the calling thread's stack, in separate fields for fast access.

    Attributes:
        replica: the current replica, ``None`` outside ``run``.
        strategy: the current strategy, ``None`` if there is none.
        below: the rest of the stack.
        in_whole_call: whether a mirrored module, and all that it calls, runs unsplit.
        stepping: the optimizers that step in this thread now, outermost first.
    """

    replica: Replica | None
    strategy: Any
    below: Context | None
    in_whole_call: bool
    stepping: tuple[Any, ...]

    def __init__(self) -> None:
        # Not as class attributes: before torch 2.11, torch.compile takes these for the values.
        self.replica = self.strategy = self.below = None
        self.in_whole_call, self.stepping = False, ()


current = _Current()


def replica_of(replicas: Replicas) -> Replica | None:
    """Returns the current replica if it is one of these, else ``None``."""
    replica = current.replica
    return replica if replica is not None and replica.replicas is replicas else None


def current_lane() -> tuple[Timeline | None, int]:
    """Returns the timeline of the calling code, and its lane in it."""
    replica = current.replica
    if replica is None:
        return latest_timeline(), CROSS
    return replica.replicas.timeline, replica.replica_id


def is_active_in(replicas: Replicas) -> bool:
    """Whether this thread belongs to one of these replicas, which may be merging."""
    if replica_of(replicas) is not None:
        return True
    below = current.below
    while below is not None:
        replica, _, below = below
        if replica is not None and replica.replicas is replicas:
            return True
    return False


def enclosing_replica() -> Replica | None:
    """Returns the innermost replica, of any strategy, that this thread belongs to."""
    replica, below = current.replica, current.below
    while replica is None and below is not None:
        replica, _, below = below
    return replica


def check_current(replica: Replica) -> None:
    """Raises StrategyError unless the calling code is this replica's."""
    if current.replica is not replica and not replica.run.is_default:
        raise StrategyError(
            "this replica context belongs to a run that has ended, or to another replica or "
            "thread; call mirror.get_replica_context() where you need it"
        )


def save_context() -> Context:
    """Returns the current context, to be restored later. See [Note: Interrupts]."""
    return current.replica, current.strategy, current.below


def push_context(strategy: Any, replica: Replica | None) -> None:
    """Makes a strategy's replica current, or its cross-replica context with ``None``."""
    current.below = current.replica, current.strategy, current.below
    current.replica, current.strategy = replica, strategy


def renaming(replica: Replica) -> AbstractContextManager[object]:
    """Returns a context that maps device names in a replica's code to its own. [Note: Places].

    Applies if replicas have several devices each.
    """
    replicas = replica.replicas
    if replica.replica_id == 0 or not replicas.mesh.is_model_parallel:
        return nullcontext()
    names = replicas.mesh.names(replica.replica_id)
    return DeviceRemap(names, lambda: replica_of(replicas) is not None)


def refuse_within_another(replicas: Replicas, what: str) -> None:
    """Raises StrategyError inside ``run`` of another strategy.

    N replicas run the same code, so they would train this strategy's model N times, each time on
    a part of the batch. A strategy that a replica has created itself is excepted.
    """
    replica = current.replica
    if replica is None or replica.replicas is replicas or replicas.is_nested:
        return
    if replica.replicas.num_replicas > 1:
        raise StrategyError(
            f"{what} of {replicas.strategy!r} was called inside run of "
            f"{replica.replicas.strategy!r}, once by every replica there; mirror both models with "
            "one strategy, or call it outside run, or in "
            "mirror.get_replica_context().merge_call(fn)"
        )
