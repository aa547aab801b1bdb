"""GradReducer: when local gradients are reduced.

[Note: Lazy gradients]
A backward pass leaves each replica's local gradient in the C++ slot of its copies, and
``GradTracker`` records it: ``grad_tracker.py``. The reduction runs when a gradient is first used
(``p.grad`` or ``optimizer.step()``, a merge point inside ``run``), or when ``run`` ends. Several
backward passes before that cost one reduction. A hook never waits. Pending gradients are recorded
per replica: with one record for all, replica 1's ``zero_grad`` would reduce replica 0's gradients.

Until it is reduced, a local gradient is in exactly one of four places:

    the slot of its copy        ``pending`` names the copy, or ``GradTracker.find`` will find it
    a bucket in flight          taken out of the slots of all replicas at once: [Note: Buckets]
    ``deferred``                taken out of the slot under ``no_sync``
    ``PackedPasses``            in the memory where a program has left it: ``packed_grads.py``

There is something to reduce while any of the four is not empty.

How they are reduced: ``LocalReduction`` in ``local_reduction.py``, in one process;
``WorkerReduction`` in ``multi_worker/worker_reduction.py``, over several workers. How much each
gradient counts: [Note: Shares] in ``shares.py``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from typing import Any, Protocol

from torch import Tensor

from mirror.errors import StrategyError
from mirror.execution.lifecycle import LifecycleHooks, WhilePending
from mirror.execution.replicas import Replicas
from mirror.execution.run import Replica, Run, replica_of
from mirror.execution.runner import Runner
from mirror.replica.gradients.exposed_grads import ExposedGrads
from mirror.replica.gradients.grad_scatter import GradScatter
from mirror.replica.gradients.grad_tracker import GradTracker
from mirror.replica.gradients.packed_grads import PackedGrads
from mirror.replica.gradients.ready_grads import DeferredGrads, add_grads, local_grad
from mirror.replica.gradients.shares import PassWeights, Shares
from mirror.replica.params.replicated_param import ReplicatedParam
from mirror.threads.merge_point import MergePoint


class Reduction(Protocol):
    """How gradients are reduced; see ``LocalReduction`` and ``WorkerReduction``.

    Attributes:
        tracker: records local gradients as they arrive.
        deferred: per variable, the replicas' weighted gradients from under ``no_sync``.
        scatter: reduces gradients to the replicas that update them; ``None`` if all need them.
        bytes_per_pack: the most bytes of a bucket.
    """

    tracker: GradTracker
    deferred: DeferredGrads
    scatter: GradScatter | None
    bytes_per_pack: int

    def order_of_arrival(self) -> Sequence[ReplicatedParam]:
        """Returns the variables in the order in which gradients arrive, the same on all workers.

        Only those that are known.
        """

    def reduce(self, weights: PassWeights) -> None:
        """Sums the local gradients, weighted, into every replica's ``.grad``.

        A replica that did not use a variable counts zero for it; if no replica used it, ``.grad``
        is unchanged. Deferred gradients are added.
        """

    def defer(self, weights: PassWeights) -> None:
        """Moves the local gradients, weighted, to ``deferred``."""

    def drop(self, variable: ReplicatedParam, replica_ids: Sequence[int]) -> bool:
        """Drops a variable's unreduced gradients, for these replicas.

        Returns:
            Whether all that have arrived must be reduced now, since other workers reduce them.
        """

    def discard(self) -> None:
        """Drops all gradients that are not reduced."""

    def pack(self, variables: Sequence[ReplicatedParam]) -> PackedGrads | None:
        """Returns memory in which gradients of these variables can be left; see PackedGrads."""

    def forget(self, variable: ReplicatedParam) -> None:
        """Drops the unreduced gradients of a variable that was freed; takes no lock."""

    def close(self) -> None:
        """Releases the streams; idempotent."""


class GradReducer:
    """The gradients of a strategy's mirrored parameters that are not reduced yet.

    Args:
        reduction: how they are reduced.

    Attributes:
        tracker, deferred, scatter, bytes_per_pack, order_of_arrival, pack: see ``Reduction``.
        pending, unsettled: see ``GradTracker``.
        lent, own_grads: see ``PackedPasses``.
        exposed: the reduced gradients that the program has.
        scattered: the gradients that ``scatter`` has.
    """

    def __init__(
        self,
        replicas: Replicas,
        runner: Runner,
        shares: Shares,
        reduction: Reduction,
        exposed: ExposedGrads,
    ) -> None:
        self._replicas, self._runner, self.exposed = replicas, runner, exposed
        self._shares, self._reduction = shares, reduction
        self.tracker, self.deferred = reduction.tracker, reduction.deferred
        self.scatter, self.bytes_per_pack = reduction.scatter, reduction.bytes_per_pack
        self.pending, self.unsettled = self.tracker.pending, self.tracker.unsettled
        self.lent, self.own_grads = self.tracker.packed.lent, self.tracker.packed.own
        self.scattered = {} if self.scatter is None else self.scatter.scattered
        self.order_of_arrival, self.pack = reduction.order_of_arrival, reduction.pack
        self._shown: list[tuple[Tensor, int]] = []  # what local_gradient returned, versions

    # Whether there is something to reduce

    def must_reduce(self, replica_id: int) -> bool:
        """Whether a replica that reads a gradient must wait for a reduction first."""
        if self.scattered and self.scatter is not None and self.scatter.has(replica_id):
            return True
        return self.tracker.has_arrived(replica_id) or self.deferred.has_passes

    # The first use of a gradient

    def observe(self, replica: Replica) -> None:
        """Merges the replicas of the current run, and reduces the pending gradients."""
        run = replica.run

        def action(payloads: dict[int, None]) -> dict[int, None]:
            if self.scattered and self.scatter is not None:
                self.scatter.settle(run.active)
            self.reduce_pending(run)
            self.gather()
            return payloads

        point = MergePoint("the first look at the gradients", (), None, action)
        run.merge(replica.replica_id, point)

    def close_with_weight(self, replica: Replica) -> None:
        """Reduces gradients with a replica's old weight before that weight changes."""
        if not self.tracker.has_arrived(replica.replica_id):
            return

        def action(payloads: dict[int, None]) -> dict[int, None]:
            self._reduce_or_defer(replica.run)
            return payloads

        point = MergePoint("a new weight after a backward pass", (), None, action)
        replica.run.merge(replica.replica_id, point)

    def reduce_pending(self, run: Run) -> None:
        """Reduces the gradients of a run's backward passes, and the deferred ones."""
        if self.tracker.have_arrived() or self.deferred.has_passes:
            self._reduction.reduce(self._shares.in_run(run))

    def flush(self) -> None:
        """Reduces the gradients of backward passes in the cross-replica context."""
        if self.tracker.have_arrived() or self.deferred.has_passes:
            if self.exposed.grads:
                self.exposed.before_reduction()
            self._reduction.reduce(self._shares.outside())
            if self.exposed.grads:
                self.exposed.refresh()

    def gather(self) -> None:
        """Gives all replicas the whole of the gradients that are scattered."""
        if self.scattered and self.scatter is not None:
            self.scatter.gather()

    # Runs, and blocks of no_sync

    def part(self) -> LifecycleHooks:
        """Returns the hooks that reduce or defer gradients at the end of a run."""
        sources: tuple[Collection[Any], ...] = (self._shown, *self.tracker.sources)
        return LifecycleHooks(
            name="gradients",
            prepare=tuple(WhilePending(source, self._prepare) for source in sources),
            finish=tuple(WhilePending(s, self._finish) for s in (self.scattered, *sources)),
            recover=self._reduction.discard,
        )

    def _prepare(self) -> None:
        if self.exposed.grads:
            self.exposed.before_reduction()
        self._reduce_or_defer()
        if self.exposed.grads:
            self.exposed.refresh()

    def _finish(self, run: Run) -> None:
        if self.scattered and self.scatter is not None:
            self.scatter.settle(run.active)
        self._reduce_or_defer(run)

    @contextmanager
    def deferring_gradients(self) -> Iterator[None]:
        """Defers gradients inside the ``with`` block; the next reduction reduces their sum."""
        self._runner.check_between_runs("no_sync")
        outer = self.deferred.is_open
        self.flush()
        self.gather()
        self.deferred.is_open = True
        try:
            yield
            self._reduce_or_defer()
        finally:
            self.deferred.is_open = outer

    def _reduce_or_defer(self, run: Run | None = None) -> None:
        """Reduces or defers the remaining gradients of a run, or of the code between two runs.

        Raises:
            StrategyError: the program has changed the copy that ``local_gradient`` returned.
        """
        shown = self._shown.copy()
        self._shown.clear()
        if any(total._version != version for total, version in shown):
            raise StrategyError(
                "a gradient was changed in place under no_sync, where .grad is the sum of several "
                "parts; change gradients after no_sync, or set .grad"
            )
        if self.tracker.have_arrived():
            weights = self._shares.outside() if run is None else self._shares.in_run(run)
            if self.deferred.is_open:
                self._reduction.defer(weights)
            else:
                self._reduction.reduce(weights)

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

    # Dropping

    def drop(self, variable: ReplicatedParam, replica_ids: Sequence[int]) -> None:
        """Drops a variable's unreduced gradients, for these replicas."""
        if self._reduction.drop(variable, replica_ids):
            replica = replica_of(self._replicas)
            if replica is None:
                self.flush()
            else:
                self.observe(replica)

    def forget(self, variable: ReplicatedParam) -> None:
        """Drops the unreduced gradients of a variable that was freed; takes no lock."""
        self.tracker.forget(variable)
        self.deferred.forget(variable)
        self._reduction.forget(variable)

    def close(self) -> None:
        """Releases the streams of the reduction; idempotent."""
        self._reduction.close()
