"""One run: a function called once per replica, and the context each call sees."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from mirror.compiler import let_go, opaque, take_hold
from mirror.errors import StrategyError
from mirror.execution.current import current, enter, leave
from mirror.execution.lockstep import Lockstep
from mirror.execution.merge_point import MergePoint
from mirror.execution.random_streams import RandomStreams
from mirror.replica.assigned import refuse_unlike_flags, refuse_unlike_values
from mirror.replica.attributes import OwnValues
from mirror.replica.collectives import all_gather, all_reduce
from mirror.replica.nodes import order
from mirror.replica.plain import PlainLeaves
from mirror.replica.recompute import NoMerges
from mirror.signposts import signposted
from mirror.timeline import WAITING
from mirror.uncopied import Uncopied
from mirror.values import regroup, select

if TYPE_CHECKING:
    from mirror.replica.group import ReplicaGroup
    from mirror.replica.variables import Variable


class Run:
    """What the replicas of one call of ``run`` have in common."""

    __slots__ = (
        "active",
        "assigned",
        "attributes",
        "contexts",
        "depth",
        "group",
        "is_default",
        "is_weighted",
        "lockstep",
        "modes",
        "outer",
        "plain",
        "results",
        "stepped",
        "streams",
    )

    def __init__(
        self,
        group: ReplicaGroup,
        lockstep: Lockstep | NoMerges,
        active: tuple[int, ...],
        weights: Sequence[float] | None,
        outer: Run | None,
    ) -> None:
        self.group = group
        self.lockstep = lockstep
        self.active = active
        self.results: dict[int, Any] = {}
        # Optimizers stepped by all its replicas, and what options those that returned have left.
        self.stepped: dict[Any, dict[int, Any]] = {}
        self.attributes: list[OwnValues] = []  # that its replicas have set or read
        self.assigned: dict[Variable, bool] = {}  # see mirror/replica/assigned.py
        self.modes: dict[int, tuple[Any, dict[int, bool]]] = {}  # set by train() and eval()
        self.is_weighted = weights is not None
        self.is_default = False  # without a strategy, where nothing is distributed
        self.outer = outer
        self.plain: PlainLeaves | None = None  # made when a replica trains any
        self.depth: int = 0 if outer is None else outer.depth + 1
        self.streams: RandomStreams | None = None  # apart, where replicas take turns on the CPU
        if len(active) > 1 and group.streams.are_apart:
            self.streams = group.streams.begin(active[0])
        self.contexts = {
            r: ReplicaContext(self, r, 1.0 if weights is None else float(weights[r]))
            for r in active
        }

    def goes_on(self) -> bool:
        """Whether the run has not been left to itself, by an interrupt of the one around it."""
        running = self.group.running
        while running is not None and running is not self:
            running = running.outer
        return running is not None

    def shares(self) -> dict[int, float]:
        """Returns what each replica's gradient counts for. See [Note: Shares]."""
        if not self.group.weighted:
            return dict.fromkeys(self.active, 1.0)
        weights = self.weights()
        total = sum(weights.values())
        if total == 0:  # one device: the mean over nothing
            return dict.fromkeys(self.active, 1.0 / len(self.active))
        return {r: weight / total for r, weight in weights.items()}

    def weights(self) -> dict[int, float]:
        """Returns the active replicas' weights by replica id."""
        return {r: context.weight for r, context in self.contexts.items()}

    def all_weights(self) -> list[float] | None:
        """Returns the weights of all replicas, 0 for those that sit out; ``None`` without any."""
        if not self.is_weighted:
            return None
        weights = self.weights()
        return [weights.get(r, 0.0) for r in range(self.group.num_replicas)]

    def merge(self, replica_id: int, point: MergePoint) -> Any:
        """Merges the replicas of this run; the action runs in the cross-replica context."""
        context = self.contexts[replica_id]
        if current.replica is not context:
            context.check_current()
        if context.lent and any(o.is_within_step(sys._getframe()) for o in context.lent):
            raise StrategyError(
                f"{point} was called inside optimizer.step, where every replica steps alone; call "
                "it before the step"
            )
        action = point.action

        def act(payloads: dict[int, Any]) -> dict[int, Any]:
            if self.modes:
                self.check_modes()
            if self.assigned:
                refuse_unlike_flags(self.assigned, self)
            enter(self.group.strategy, None)
            try:
                return action(payloads)
            finally:
                leave()

        point.action = act
        if context.lent:
            context.release()
        watch = self.group.stopwatches[replica_id] if self.group.stopwatches else None
        timeline = self.group.timeline
        hold = let_go()  # actions are no code of the user's
        timeline.begin(replica_id, WAITING, point.operation)
        if watch is not None:
            watch.stop()
        try:
            result = self.lockstep.merge(replica_id, point)
        except Exception:  # what the replica may handle, and go on
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
            take_hold(hold)

    def drawing_for_all(self, replica_id: int) -> AbstractContextManager[None]:
        """Has a replica draw what all will have, as one device would."""
        return nullcontext() if self.streams is None else self.streams.for_all(replica_id)

    def enter_stream(self, replica_id: int) -> None:
        """Has a replica, which has got the turn, draw from its own stream."""
        if self.streams is not None and self.streams.inside != replica_id:
            self.streams.enter(replica_id)

    def leaves(self) -> PlainLeaves:
        """Returns the plain leaves that its replicas train."""
        if self.plain is None:
            self.plain = PlainLeaves()
        return self.plain

    def check_modes(self) -> None:
        """Raises StrategyError if some replicas alone have changed a module's mode."""
        modes, self.modes = self.modes, {}
        for module, of_replicas in modes.values():
            if len(of_replicas) < len(self.active) or len(set(of_replicas.values())) > 1:
                called = ", ".join(
                    f"replica {r} called {'train' if mode else 'eval'}()"
                    for r, mode in of_replicas.items()
                )
                raise StrategyError(
                    f"the mode of a {type(module).__name__} belongs to all replicas, but not all "
                    f"have set it alike: {called}; call train() and eval() outside strategy.run, "
                    "or on every replica"
                )

    def finish(self) -> None:
        """Reduces, or defers, the gradients that nobody has looked at; joins attributes."""
        if self.modes:
            self.check_modes()
        if self.assigned:
            assigned, self.assigned = self.assigned, {}
            refuse_unlike_flags(assigned, self)
            refuse_unlike_values(assigned, self)
        if self.group.num_replicas > 1:
            while self.stepped:
                optimizer, left = self.stepped.popitem()
                optimizer.check_left(left)
            while self.attributes:
                self.attributes.pop().join(self)
            self.group.gradients.finish(self.shares)
            if self.plain is not None:
                self.plain.tell(self.group)
            order.lift_this_thread()

    def call_outside(self, fn: Callable[[], Any]) -> Any:
        """Calls ``fn`` in a merge: as if the run had ended here, and a new one began after."""
        group = self.group
        if group.num_replicas > 1:
            self.finish()
            group.note_run(self.active)
            group.bring_along(self.active)
            group.settle()
        if self.streams is not None:
            self.streams.enter_first()
        try:
            return fn()
        finally:
            if group.num_replicas > 1:
                group.prepare()


@signposted
class ReplicaContext(Uncopied):
    """What a function sees of its replica inside ``strategy.run``.

    Attributes:
        replica_id_in_sync_group: this replica's index.
        num_replicas_in_sync: the number of replicas of the strategy.
        device: where this replica's variables are.
        strategy: the strategy that runs it.
    """

    __slots__ = ("_weight", "device", "group", "lent", "replica_id", "run", "strategy")
    _instead = "call mirror.get_replica_context() where you need it"

    def __init__(self, run: Run, replica_id: int, weight: float) -> None:
        self.run = run
        self.group = run.group
        self.replica_id = replica_id
        self.device: torch.device = run.group.devices[replica_id]
        self.strategy: Any = run.group.strategy
        self.lent: list[Any] = []  # optimizers that this replica's step has
        self._weight = weight

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.group.names[self.replica_id]})"

    @property
    def replica_id_in_sync_group(self) -> int:
        """This replica's index."""
        return self.replica_id

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas of the strategy."""
        return self.group.num_replicas

    def check_current(self) -> None:
        """Raises StrategyError but to code of this replica."""
        if current.replica is not self and not self.run.is_default:
            raise StrategyError(
                "this replica context belongs to a run that has ended, or to another replica or "
                "thread; call mirror.get_replica_context() where you need it"
            )

    @property
    def weight(self) -> float:
        """This replica's share in the gradient mean and in ``strategy.reduce("mean", ...)``.

        The number of examples it got, unless set: to its number of unpadded tokens, say. Set it
        before backward; a backward pass done before counts with the weight it was done under.

        Raises:
            ValueError: on setting, for a negative or not finite weight.
        """
        return self._weight

    @weight.setter
    @opaque
    def weight(self, value: float) -> None:
        self.check_current()
        value = float(value)
        if not math.isfinite(value) or value < 0:
            raise ValueError(f"a replica's weight must be finite and >= 0, got {value}")
        gradients = self.group.gradients
        if gradients.has_arrived(self.replica_id):

            def action(payloads: dict[int, None]) -> dict[int, None]:
                gradients.finish(self.run.shares)
                return payloads

            point = MergePoint("a new weight after a backward pass", (), None, action)
            self.run.merge(self.replica_id, point)
        self._weight = value
        self.run.is_weighted = True

    @opaque
    def all_reduce(self, op: Any, value: Any) -> Any:
        """Reduces a structure of tensors over the replicas that take part, in one collective.

        Differentiable for sum and mean, as part of the one loss that the replicas have in common;
        see [Note: Gradients of collectives] in ``mirror/replica/nodes.py``.

        Args:
            op: ``"sum"``, ``"mean"`` (the plain mean), ``"max"``, ``"min"``, ``"prod"``, any case,
                or a ``mirror.ReduceOp``.
            value: tensors or numbers, nested; equal structure, shapes and dtypes everywhere.

        Returns:
            The same structure with the same bits on every replica, each on its device. The mean
            of integers is of the default floating dtype.

        Raises:
            TypeError: a bool tensor, or a leaf that is neither tensor nor number.
            DivergenceError: another replica calls something else, or with other shapes.
            ValueError: unknown ``op``.
        """
        return all_reduce(self, op, value)

    @opaque
    def all_gather(self, value: Any, axis: int = 0) -> Any:
        """Concatenates each tensor of a structure over the replicas, in replica order.

        Sizes may differ along ``axis``. Differentiable: each replica gets the weighted sum of the
        gradients of its own part.

        Raises:
            ValueError: a 0-d tensor, or ``axis`` out of range.
            DivergenceError: shapes differ on another axis, or dtypes do.
        """
        return all_gather(self, value, axis)

    @opaque
    def merge_call(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Calls ``fn(strategy, *args, **kwargs)`` once, in the cross-replica context.

        Waits for all replicas. Tensors, numbers and objects that differ arrive as PerReplica (as
        they are without any strategy); each replica gets its part of the result.
        """

        def action(payloads: dict[int, Any]) -> dict[int, Any]:
            run = self.run
            if run.is_default:
                args, kwargs = payloads[0]
            else:
                args, kwargs = regroup(payloads, self.group.num_replicas, run.all_weights())
            result = run.call_outside(partial(fn, self.strategy, *args, **kwargs))
            if result is None:
                return dict.fromkeys(payloads)
            return {r: select(result, r) for r in payloads}

        payload = (tuple(args), dict(kwargs or {}))
        name = getattr(fn, "__qualname__", type(fn).__qualname__)
        return self.run.merge(
            self.replica_id, MergePoint("merge_call", name, payload, action, detail=name)
        )

    def call(self, fn: Callable[[int], Any]) -> Any:
        """Calls the replica's function, which draws from its own random stream."""
        run, replica_id = self.run, self.replica_id
        if run.streams is not None and run.streams.inside != replica_id:
            run.streams.enter(replica_id)
        result = self._measured(fn) if self.group.stopwatches else fn(replica_id)
        if run.stepped:
            for optimizer, left in run.stepped.items():
                left[replica_id] = optimizer.options()
        return result

    def _measured(self, fn: Callable[[int], Any]) -> Any:
        """Calls the replica's function, and counts the time."""
        watch = self.group.stopwatches[self.replica_id]
        watch.start()
        try:
            return fn(self.replica_id)
        finally:
            watch.stop()

    def release(self) -> None:
        """Gives back the optimizers of a step that raised."""
        while self.lent:
            self.lent.pop().give_back()
