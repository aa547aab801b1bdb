"""LocalReduction: reduces the gradients of the replicas of one process.

Buckets that filled during the pass are in flight: ``buckets.py``. The rest is reduced here, at the
first use of a gradient: all dense gradients at once, sparse ones one by one. When that is:
[Note: Lazy gradients] in ``grad_reducer.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch

from mirror.base.timeline import CROSS, REDUCTION
from mirror.execution.replicas import Replicas
from mirror.execution.runner import Runner
from mirror.replica.gradients.buckets import Buckets
from mirror.replica.gradients.grad_scatter import GradScatter
from mirror.replica.gradients.grad_tracker import GradTracker
from mirror.replica.gradients.non_finite import NonFiniteCheck
from mirror.replica.gradients.ready_grads import (
    DeferredGrads,
    ReadyGrads,
    Reducer,
    ReplicaGrads,
    accumulate,
    are_non_dense,
    are_usual,
    common_scale,
    local_grad,
    reduce_non_dense,
    run_hooks,
    take,
    weigh,
)
from mirror.replica.gradients.shares import PassWeights, Shares
from mirror.replica.params.replicated_param import ReplicatedParam


class LocalReduction:
    """Reduces the gradients of the replicas of one process: see ``Reduction``.

    Args:
        finite: checks gradients before they are reduced; ``None`` for no check.
    """

    def __init__(
        self,
        replicas: Replicas,
        runner: Runner,
        reducer: Reducer,
        shares: Shares,
        finite: NonFiniteCheck | None,
    ) -> None:
        self._replicas, self._runner, self._reducer = replicas, runner, reducer
        self._finite = finite
        self.bytes_per_pack = reducer.bytes_per_pack
        self.tracker, self.deferred = GradTracker(replicas), DeferredGrads()
        self.scatter: GradScatter | None = None
        if replicas.shards_state:
            self.scatter = GradScatter(replicas, reducer.wire_dtype)
        self._buckets = Buckets(
            replicas, runner, reducer, self.tracker, shares, self.deferred, finite, self.scatter
        )

    @torch.no_grad()
    def reduce(self, weights: PassWeights) -> None:
        """Sums the local gradients, weighted, into every replica's ``.grad``."""
        if self.scatter is not None and self.scatter.scattered:
            self.scatter.settle(weights)
        # 1. Take the gradients out of their slots, and wait for the buckets in flight.
        adds_deferred = self.deferred.has_passes
        arrivals, by_replica = self._take(weights)
        self._buckets.collect()
        # 2. Weigh them. The sum is multiplied by a share that all replicas have.
        variables, targets = arrivals.variables, arrivals.targets
        scale = None if adds_deferred else common_scale(weights)
        if scale is None:
            scale = 1.0
            weigh(by_replica, weights)
        # 3. Reduce those that are not dense, and those that are stepped in slices.
        is_usual = not arrivals.is_complex and are_usual(chain(*by_replica))
        if adds_deferred or not is_usual:
            variables, by_replica = self._reduce_unusual(variables, by_replica, scale)
            targets = [[v.targets[r] for v in variables] for r in range(len(by_replica))]
        if variables and self.scatter is not None:
            streams = self.tracker.streams
            rest = self.scatter.reduce(variables, targets, by_replica, scale, streams)
            if rest:
                variables = [variables[i] for i in rest]
                by_replica = [[grads[i] for i in rest] for grads in by_replica]
                targets = [[mine[i] for i in rest] for mine in targets]
            else:
                variables, by_replica, targets = [], [], []
        # 4. Sum the others, and add the sums to every replica's gradients.
        if variables:
            self._replicas.timeline.begin(
                CROSS, REDUCTION, f"gradients of {len(variables)} parameters"
            )
            self._reducer.all_reduce(self._reducer.move(by_replica, self.tracker.streams), scale)
            self._replicas.timeline.end(CROSS, REDUCTION)
            run_hooks(variables, by_replica)
        self._runner.unfinished = True  # some replicas have it, some not: [Note: Interrupts]
        for mine, reduced in zip(targets, by_replica, strict=True):
            accumulate(mine, reduced)
        self._runner.unfinished = self._runner.running is not None
        if self.tracker.streams is not None:
            self.tracker.forget_streams()

    def _take(self, weights: PassWeights) -> tuple[ReadyGrads, list[ReplicaGrads]]:
        """Takes the local gradients out of their slots.

        Returns:
            The copies, without those of buckets in flight, and the gradients of each replica.

        Raises:
            GradientError: a gradient is not finite, and ``finite`` checks that.
        """
        arrivals, is_known = self.tracker.record_arrival_order()
        rest = arrivals
        if self.tracker.in_flight:
            rest = arrivals.skip(sum([len(bucket.copies[0]) for bucket in self.tracker.in_flight]))
        if self._finite is not None:
            grads = [
                list(map(local_grad, mine)) if weights.get(r) else []  # of weight 0: not checked
                for r, mine in enumerate(rest.copies)
            ]
            if not self._finite.all_finite(grads):
                self.discard()
                self._finite.raise_error(grads, rest.variables)
            del grads  # unshare counts the references to their memory
        self._buckets.record_order(arrivals, again=is_known)
        if self._buckets.is_disordered:
            self._buckets.forget_order()
            self.tracker.restore_hooks()
        taken = take(rest.copies)
        self.tracker.clear()  # last, so that gradients are found again after an interrupt
        return rest, taken

    def _reduce_unusual(
        self, variables: list[ReplicatedParam], by_replica: list[ReplicaGrads], scale: float
    ) -> tuple[list[ReplicatedParam], list[ReplicaGrads]]:
        """Reduces sparse and other non-dense gradients; returns the rest, filled with zeros."""
        if self.deferred.has_passes:
            self.deferred.add(variables, by_replica)
            variables, by_replica = self.deferred.take_all()
        usual = []
        for position, variable in enumerate(variables):
            grads = [grads_of_replica[position] for grads_of_replica in by_replica]
            if all(grad is None for grad in grads):
                continue
            if are_non_dense(grads):
                reduce_non_dense(variable, grads, scale)
            else:
                usual.append(position)
        filled: list[ReplicaGrads] = [[] for _ in by_replica]
        for r, grads_of_replica in enumerate(by_replica):
            for position in usual:
                grad = grads_of_replica[position]
                if grad is None:
                    grad = torch.zeros_like(variables[position].targets[r])
                filled[r].append(grad)
        return [variables[i] for i in usual], filled

    @torch.no_grad()
    def defer(self, weights: PassWeights) -> None:
        """Moves the local gradients, weighted, to ``deferred``."""
        arrivals, by_replica = self._take(weights)
        self._buckets.collect()
        weigh(by_replica, weights)
        self.deferred.add(arrivals.variables, by_replica)
        self.tracker.forget_streams()

    def drop(self, variable: ReplicatedParam, replica_ids: Sequence[int]) -> bool:
        """Drops a variable's unreduced gradients, for these replicas; returns False."""
        pending, unsettled = self.tracker.pending, self.tracker.unsettled
        sources = [pending[r] or unsettled[r] for r in replica_ids]
        if self.tracker.may_have_arrived or any(sources) or self.tracker.in_flight:
            self._buckets.drop(variable, replica_ids)  # first: no bucket takes others meanwhile
        self.tracker.drop_local(variable, replica_ids)
        self.deferred.drop(variable, replica_ids)
        if self.scatter is not None and self.scatter.scattered:
            self.scatter.drop(variable, replica_ids)
        return False

    def discard(self) -> None:
        """Drops all gradients that are not reduced."""
        self._buckets.discard()
        self.tracker.discard()

    def forget(self, variable: ReplicatedParam) -> None:
        """Drops the unreduced gradients of a variable that was freed; takes no lock."""
        if self.scatter is not None:
            self.scatter.forget(variable)
        self._buckets.forget(variable)

    def close(self) -> None:
        """Closes the side stream; idempotent."""
        self._buckets.close()
