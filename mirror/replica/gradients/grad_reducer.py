"""GradReducer: when local gradients are reduced, and how they are weighted.

[Note: Lazy gradients]
A backward pass leaves each replica's local gradient in the C++ slot of its copies, and
``GradTracker`` records it: ``grad_tracker.py``. The reduction runs when a gradient is first used
(``p.grad`` or ``optimizer.step()``, a merge point inside ``run``), or when ``run`` ends. Several
backward passes before that cost one reduction. A hook never waits. Pending gradients are recorded
per replica: with one record for all, replica 1's ``zero_grad`` would reduce replica 0's gradients.

Until it is reduced, a local gradient is in exactly one of three places:

    the slot of its copy        ``pending`` names the copy, or ``GradTracker.find`` will find it
    a bucket in flight          taken out of the slots of all replicas at once: [Note: Buckets]
    ``deferred``                taken out of the slot under ``no_sync``

There is something to reduce while any of the three is not empty.

[Note: Shares]
A backward pass inside ``run`` starts from each replica's own loss, the mean over its own
examples. Its gradient counts with the replica's share, ``weight / sum of weights`` ("mean": the
result of one device on the whole batch), or with 1 ("sum"). A backward pass in the cross-replica
context starts from the loss of the whole batch, so its local gradients are added unweighted. Under
``no_sync`` the shares of a run are applied when it ends, and the weighted gradients are kept in
``deferred`` until the next reduction. Over several workers: [Note: Shares of workers] in
``multi_worker/pass_weights.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, reduce

import torch
from torch import Tensor

from mirror.base.timeline import CROSS, REDUCTION
from mirror.errors import StrategyError
from mirror.execution.lifecycle import LifecycleHooks
from mirror.execution.replicas import Replicas
from mirror.execution.run import Replica, Run
from mirror.execution.runner import Runner
from mirror.replica.collectives.reducer import Reducer
from mirror.replica.gradients.buckets import Buckets
from mirror.replica.gradients.grad_scatter import GradScatter, reduce_scattered
from mirror.replica.gradients.grad_tracker import GradTracker, register_listener
from mirror.replica.gradients.non_finite import NonFiniteCheck
from mirror.replica.gradients.ready_grads import (
    DeferredGrads,
    ReadyGrads,
    ReplicaGrads,
    accumulate,
    add_grads,
    are_non_dense,
    are_usual,
    common_scale,
    fill_missing,
    local_grad,
    reduce_non_dense,
    run_hooks,
    set_local_grad,
    take,
    weigh,
)
from mirror.replica.params.replicated_param import ReplicaParameter, ReplicatedParam
from mirror.threads.merge_point import MergePoint


class GradReducer:
    """The gradients of a strategy's mirrored parameters that are not reduced yet.

    Args:
        finite: checks gradients before they are reduced; ``None`` for no check.

    Attributes:
        tracker: records local gradients as they arrive.
        pending, unsettled: see ``GradTracker``.
        deferred: per variable, the replicas' weighted gradients from under ``no_sync``.
        deferring: whether a ``no_sync`` is open.
        scatter: reduces gradients to the replicas that update them; ``None`` if all need them.
        scattered: the gradients that it has.
    """

    def __init__(
        self, replicas: Replicas, runner: Runner, reducer: Reducer, finite: NonFiniteCheck | None
    ) -> None:
        self._replicas, self._runner, self._reducer = replicas, runner, reducer
        self._finite = finite
        self.tracker = GradTracker(replicas)
        self.pending, self.unsettled = self.tracker.pending, self.tracker.unsettled
        self._sources = (*self.pending, *self.unsettled)
        self.deferred = DeferredGrads()
        self.deferring = False
        self.scatter: GradScatter | None = None
        if replicas.shards_state and not replicas.workers.is_multi_process:
            self.scatter = GradScatter(replicas, reducer.wire_dtype)
        self.scattered = {} if self.scatter is None else self.scatter.scattered
        self.buckets = Buckets(
            replicas,
            runner,
            reducer,
            self.tracker,
            lambda: not (self.deferring or self.deferred),
            finite,
            self.scatter,
        )
        self._arrivals: ReadyGrads | None = None  # of the last pass, for the next one
        self._may_be_silent = replicas.mirrors and register_listener(self.tracker)
        self._shown: list[tuple[Tensor, int]] = []  # what local_gradient returned, versions

    @property
    def bytes_per_pack(self) -> int:
        """The bytes of a bucket."""
        return self._reducer.bytes_per_pack

    def order_of_arrival(self) -> Sequence[ReplicatedParam]:
        """Returns the variables in the order in which gradients have last arrived, if known."""
        return () if self._arrivals is None else self._arrivals.variables

    def part(self) -> LifecycleHooks:
        """Returns the hooks that reduce or defer gradients at the end of a run."""
        return LifecycleHooks(
            name="gradients", prepare=self._prepare, finish=self._finish, recover=self.discard
        )

    def _prepare(self) -> None:
        if self._shown or self.tracker.may_have_arrived or any(self._sources):
            self.finish(self.equal_shares)

    def _finish(self, run: Run) -> None:
        if self.scattered and self.scatter is not None:
            self.scatter.settle(run.active)
        if self._shown or self.tracker.may_have_arrived or any(self._sources):
            self.finish(partial(self.shares_in, run))

    def must_reduce(self, replica_id: int) -> bool:
        """Whether a replica that reads a gradient must wait for a reduction first."""
        if self.scattered and self.scatter is not None and self.scatter.has(replica_id):
            return True
        return bool(self.has_arrived(replica_id) or self.deferred)

    def has_arrived(self, replica_id: int) -> bool:
        """Whether a replica has unreduced gradients from backward passes."""
        if self.unsettled[replica_id]:
            self.tracker.scan_replica(replica_id)
        return bool(self.pending[replica_id] or self.buckets.in_flight)

    def have_arrived(self) -> bool:
        """Whether any replica has unreduced gradients from backward passes."""
        if not (self.tracker.may_have_arrived or any(self._sources)):
            return False
        self.tracker.scan()
        return any(self.pending) or bool(self.buckets.in_flight)

    def observe(self, replica: Replica) -> None:
        """Merges the replicas of the current run, and reduces the pending gradients."""
        run = replica.run

        def action(payloads: dict[int, None]) -> dict[int, None]:
            if self.scattered and self.scatter is not None:
                self.scatter.settle(run.active)
            self.reduce_pending(self.shares_in(run))
            self.gather()
            return payloads

        point = MergePoint("the first look at the gradients", (), None, action)
        run.merge(replica.replica_id, point)

    def close_with_weight(self, replica: Replica) -> None:
        """Reduces gradients with a replica's old weight before that weight changes."""
        if not self.has_arrived(replica.replica_id):
            return

        def action(payloads: dict[int, None]) -> dict[int, None]:
            self.finish(partial(self.shares_in, replica.run))
            return payloads

        point = MergePoint("a new weight after a backward pass", (), None, action)
        replica.run.merge(replica.replica_id, point)

    def flush(self) -> None:
        """Reduces the gradients of backward passes in the cross-replica context."""
        if self.have_arrived() or self.deferred:
            self.reduce(self.equal_shares())

    def gather(self) -> None:
        """Gives all replicas the whole of the gradients that are scattered."""
        if self.scattered and self.scatter is not None:
            self.scatter.gather()

    @contextmanager
    def deferring_gradients(self) -> Iterator[None]:
        """Defers gradients inside the ``with`` block; the next reduction reduces their sum."""
        self._runner.check_between_runs("no_sync")
        outer = self.deferring
        self.flush()
        self.gather()
        self.deferring = True
        try:
            yield
            self.finish(self.equal_shares)
        finally:
            self.deferring = outer

    def shares_in(self, run: Run) -> Mapping[int, float]:
        """Returns the shares of backward passes inside a run."""
        return run.shares()

    def equal_shares(self) -> Mapping[int, float]:
        """Returns the shares of backward passes in the cross-replica context."""
        return dict.fromkeys(range(len(self.pending)), 1.0)

    def reduce_pending(self, shares: Mapping[int, float]) -> None:
        """Reduces the pending gradients, weighted by ``shares``, and the deferred ones."""
        if self.have_arrived() or self.deferred:
            self.reduce(shares)

    def finish(self, shares: Callable[[], Mapping[int, float]]) -> None:
        """Reduces or defers the remaining gradients of a run, or of the code between two runs.

        Raises:
            StrategyError: the program has changed the copy that ``local_gradient`` returned.
        """
        shown = self._shown
        if shown:
            self._shown = []
        if shown and any(total._version != version for total, version in shown):
            raise StrategyError(
                "a gradient was changed in place under no_sync, where .grad is the sum of several "
                "parts; change gradients after no_sync, or set .grad"
            )
        if self.have_arrived():
            if self.deferring:
                self._defer(shares())
            else:
                self.reduce(shares())

    def discard(self) -> None:
        """Drops all gradients that are not reduced."""
        self.buckets.discard()
        self.tracker.drop_interrupted()
        self.tracker.find()
        for copies in self.pending:
            for copy in copies:
                set_local_grad(copy, None)
        self.tracker.clear()
        self.tracker.forget_streams()

    def forget(self, variable: ReplicatedParam) -> None:
        """Drops the pending gradients of a variable that was freed."""
        self._arrivals = None
        if self.scatter is not None:
            self.scatter.forget(variable)
        self.buckets.forget(variable)
        self.tracker.forget(variable)
        self.deferred.pop(variable, None)

    def drop(self, variable: ReplicatedParam, replicas: Iterable[int]) -> None:
        """Drops a variable's unreduced gradients, for these replicas."""
        sources = (*(self.pending[r] for r in replicas), *(self.unsettled[r] for r in replicas))
        if self.tracker.may_have_arrived or any(sources) or self.buckets.in_flight:
            self.buckets.drop(variable, replicas)  # first: no bucket takes the others meanwhile
        self.tracker.drop_local(variable, replicas)
        self.deferred.drop(variable, replicas)
        if self.scattered and self.scatter is not None:
            self.scatter.drop(variable, replicas)

    def local_gradient(self, variable: ReplicatedParam, replica_id: int) -> Tensor | None:
        """Returns the sum of one replica's gradients under ``no_sync``, not reduced."""
        parts = [
            variable.targets[replica_id].grad,
            self.deferred.grads_of(variable, replica_id),
            local_grad(variable.copies[replica_id]),
        ]
        present = [part for part in parts if part is not None]
        if len(present) < 2:
            return present[0] if present else None
        total: Tensor = reduce(add_grads, present)
        self._shown.append((total, total._version))
        return total

    @torch.no_grad()
    def reduce(self, shares: Mapping[int, float]) -> None:
        """Sums the local gradients, weighted by ``shares``, into every replica's ``.grad``.

        A replica that did not use a variable counts zero for it; if no replica used it, ``.grad``
        is unchanged.
        """
        if self.scattered and self.scatter is not None:
            self.scatter.settle(shares)
        arrivals, columns = self._take(shares)
        self.buckets.collect()
        variables, targets = arrivals.variables, arrivals.targets
        scale = None if self.deferred else common_scale(shares)
        if scale is None:
            scale = 1.0
            weigh(columns, shares)
        if self.deferred or not all(map(are_usual, columns)) or arrivals.is_complex:
            variables, columns = self._reduce_unusual(variables, columns, scale)
            targets = [[v.targets[r] for v in variables] for r in range(len(columns))]
        if variables and self.scatter is not None:
            streams = self.tracker.streams
            variables, columns, targets = reduce_scattered(
                self.scatter, variables, columns, targets, scale, streams, self._replicas
            )
        if variables:
            self._replicas.timeline.begin(
                CROSS, REDUCTION, f"gradients of {len(variables)} parameters"
            )
            self._reducer.all_reduce(self._reducer.move(columns, self.tracker.streams), scale)
            self._replicas.timeline.end(CROSS, REDUCTION)
            run_hooks(variables, columns)
        self._runner.unfinished = True  # some replicas have it, some not: [Note: Interrupts]
        for mine, reduced in zip(targets, columns, strict=True):
            accumulate(mine, reduced)
        self._runner.unfinished = self._runner.running is not None
        if self.tracker.streams is not None:
            self.tracker.forget_streams()

    def _reduce_unusual(
        self, variables: list[ReplicatedParam], columns: list[ReplicaGrads], scale: float
    ) -> tuple[list[ReplicatedParam], list[ReplicaGrads]]:
        """Reduces sparse and other non-dense gradients; returns the rest, filled with zeros."""
        variables, columns = self.deferred.take_with(variables, columns)
        usual = []
        for i, variable in enumerate(variables):
            grads = [column[i] for column in columns]
            if all(grad is None for grad in grads):
                continue
            if are_non_dense(grads):
                reduce_non_dense(variable, grads, scale)
            else:
                usual.append(i)
        filled: list[ReplicaGrads] = [
            [fill_missing(column[i], variables[i], r) for i in usual]
            for r, column in enumerate(columns)
        ]
        return [variables[i] for i in usual], filled

    def _take(self, shares: Mapping[int, float]) -> tuple[ReadyGrads, list[ReplicaGrads]]:
        """Takes the local gradients out of their slots.

        Returns:
            The variables, and per replica the list of gradients.

        Raises:
            GradientError: a gradient is not finite, and ``finite`` checks that.
        """
        arrived: Sequence[Sequence[ReplicaParameter]] = self.pending
        num_launched = 0
        if self.buckets.in_flight:
            launched = self.buckets.copies_in_flight()
            num_launched = len(launched[0])
            arrived = [[*on, *rest] for on, rest in zip(launched, self.pending, strict=True)]
        known = self._arrivals is not None and self._arrivals.are_ready(arrived)
        if not known:
            self._arrivals = ReadyGrads(arrived)
        assert self._arrivals is not None
        rest = self._arrivals.skip(num_launched) if num_launched else self._arrivals
        if self._finite is not None:
            grads = [
                list(map(local_grad, mine)) if shares.get(r) else []  # a share of 0 is not checked
                for r, mine in enumerate(rest.copies)
            ]
            if not self._finite.all_finite(grads):
                self.discard()
                self._finite.raise_error(grads, rest.variables)
            del grads  # unshare counts the references to their memory
        self.buckets.learn(self._arrivals, again=known)
        if self.buckets.is_disordered:
            self.buckets.forget_order()
            self.tracker.restore_hooks()
        elif known and self._may_be_silent and self._arrivals.is_regular:
            self.tracker.drop_hooks(self._arrivals)
        taken = take(rest.copies)
        self.tracker.clear()  # last, so that gradients are found again after an interrupt
        return rest, taken

    @torch.no_grad()
    def _defer(self, shares: Mapping[int, float]) -> None:
        arrivals, columns = self._take(shares)
        self.buckets.collect()
        weigh(columns, shares)
        self.deferred.add(arrivals.variables, columns)
        self.tracker.forget_streams()
