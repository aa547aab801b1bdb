"""Run: the shared state of one call of ``run``, its merges and its weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mirror.base.dynamo import resume_dynamo, suspend_dynamo
from mirror.base.timeline import WAITING
from mirror.data.split_batch import ExampleCounts, GivenWeights
from mirror.device.events import Stopwatch
from mirror.device.streams import ReplicaStreams
from mirror.errors import StrategyError
from mirror.execution.current_replica import check_current, current
from mirror.execution.replica_rng import ReplicaRng
from mirror.execution.replicas import Replica, Replicas, SteppedOptimizer
from mirror.threads.lockstep import Lockstep, NullLockstep
from mirror.threads.merge_point import Action, MergePoint, Payloads


class Run:
    """The state that the replicas of one call of ``run`` share.

    Attributes:
        active: the ids of the replicas that take part.
        members: the active replicas by id.
        outer: the run in whose merge this one was started, if any.
        results: the function's results by replica id.
        counts: the number of examples of each replica, if the batch was split.
        is_given: whether the program has set weights.
        is_weighted: whether the replicas have explicit weights.
        is_default: whether this is the run of code without a strategy.
        has_stepped: whether an optimizer has stepped, here or in a nested run; set on outermost
            runs only.
        is_split: whether this is the run of a split call, written for the whole batch.
        is_left: whether an interrupt of the outer run has abandoned this one.
        assigned: mirrored variables that replicas have assigned; True if values, not just flags.
        checks: the ``on_merge`` hooks.
        modes: the train() and eval() modes that replicas have set, by ``id`` of the module.
        stepped: the optimizers that all replicas have stepped, with the options of each replica
            that has returned.
        stopwatches: one per replica during a measurement, else none.
        streams: the replicas' random streams, if each has its own.
    """

    __slots__ = (
        "__weakref__",
        "_on_streams",
        "active",
        "assigned",
        "checks",
        "counts",
        "depth",
        "has_stepped",
        "is_default",
        "is_given",
        "is_left",
        "is_split",
        "is_weighted",
        "lockstep",
        "members",
        "modes",
        "outer",
        "replicas",
        "results",
        "stepped",
        "stopwatches",
        "streams",
    )

    def __init__(
        self,
        replicas: Replicas,
        lockstep: Lockstep | NullLockstep,
        active: tuple[int, ...],
        weights: Sequence[float] | None = None,
        outer: Run | None = None,
        *,
        stopwatches: Sequence[Stopwatch] = (),
        streams: ReplicaRng | None = None,
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
        self.counts: Sequence[float] | None = (
            weights
            if type(weights) is ExampleCounts
            else weights.counts
            if type(weights) is GivenWeights
            else None
        )
        self.is_default = is_default
        self.is_left = self.is_split = self.has_stepped = False
        self.outer = outer
        self.depth: int = 0 if outer is None else outer.depth + 1
        self.checks = checks
        self.assigned: dict[Any, bool] = {}
        self.modes: dict[int, tuple[object, dict[int, bool]]] = {}
        self.stepped: dict[SteppedOptimizer, dict[int, object]] = {}
        self.stopwatches = stopwatches
        self.streams = streams
        self._on_streams = (
            None if replicas.are_simulated else ReplicaStreams(replicas.places.replicas)
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
        return {r: replica.weight for r, replica in self.members.items()}

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
        if self._on_streams is not None:
            self._on_streams.record(replica_id)
        watch = self.stopwatches[replica_id] if self.stopwatches else None
        timeline = self.replicas.timeline
        hold = suspend_dynamo()  # actions are not the user's code
        timeline.begin(replica_id, WAITING, point.operation)
        if watch is not None:
            watch.stop()
        try:
            result = (
                self.act(point.action, {replica_id: point.payload})[replica_id]
                if self.is_default  # there is no other replica
                else self.lockstep.merge(replica_id, point)
            )
        except Exception:  # the replica may handle it and continue
            self.enter_stream(replica_id)
            raise
        else:
            if self.streams is not None and self.streams.inside != replica_id:
                self.streams.enter(replica_id)
            return result
        finally:
            timeline.end(replica_id, WAITING)
            if watch is not None:
                watch.start()
            resume_dynamo(hold)

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

    def enter_stream(self, replica_id: int) -> None:
        """Puts the random stream of a replica, which has the turn, into the generator."""
        if self.streams is not None and self.streams.inside != replica_id:
            self.streams.enter(replica_id)

    def enter_first_stream(self) -> None:
        """Makes a merge draw from the first replica's stream, as one device would."""
        if self.streams is not None:
            self.streams.enter_first()

    def _check(self) -> None:
        if self.modes:
            self.check_modes()
        for check in self.checks:
            check(self)

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
    """Returns a replica's weight as a number.

    Raises:
        ValueError: it is negative or not finite.
    """
    weight = float(value)
    if not math.isfinite(weight) or weight < 0:
        raise ValueError(f"a replica's weight must be finite and >= 0, got {weight}")
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
    return {r: weight / total for r, weight in weights.items()}


def recomputing(replicas: Replicas, replica_id: int) -> Replica:
    """Returns a replica for the recomputation of its forward in a backward pass."""
    return Run(replicas, NullLockstep(), (replica_id,)).members[replica_id]
