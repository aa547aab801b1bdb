"""MultiWorkerGradients: gradients of replicas of several workers, reduced in agreed buckets.

A class of its own, so that the gradients of one process are as they were. What is agreed, and
when buckets travel: [Note: Agreed buckets] in ``sequence.py``; what a pass counts for: [Note:
Shares of workers] in ``weights.py``.

Local replicas are summed first, on their own devices; the first one's sums travel, in one buffer
per bucket, and come back to all. There is no thread beside: torch.distributed's sums are
asynchronous, so the hook that completes a bucket launches it, and whoever looks waits.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from mirror.base.dynamo import disable_dynamo
from mirror.base.timeline import CROSS, REDUCTION
from mirror.base.torch_private import set_grad_enabled
from mirror.execution.current_replica import current, replica_of
from mirror.execution.lifecycle import nothing
from mirror.execution.replicas import Replicas, RunView
from mirror.execution.runner import Runner
from mirror.replica.collectives.packed_reducer import Reducer
from mirror.replica.gradients.grad_reducer import GradReducer
from mirror.replica.gradients.non_finite import NonFiniteCheck
from mirror.replica.gradients.ready_grads import (
    ReadyGrads,
    are_usual,
    local_grad,
    set_local_grad,
    take,
    weigh,
)
from mirror.replica.multi_worker.bucket_order import BucketOrder, agree
from mirror.replica.multi_worker.contributions import refuse_graphs
from mirror.replica.multi_worker.in_flight import InFlight
from mirror.replica.multi_worker.pass_weights import Deferred, PassWeights
from mirror.replica.multi_worker.stand_in import trained_params
from mirror.replica.multi_worker.worker_bucket import WorkerBucket
from mirror.replica.multi_worker.worker_non_finite import NonFinite
from mirror.replica.multi_worker.worker_reduction import WorkerReduction
from mirror.replica.params.replicated_param import ReplicaParameter, ReplicatedParam
from mirror.replica.params.replicated_params import MirroredTensors, param_of


class MultiWorkerGradients(GradReducer):
    """The gradients of this worker's replicas that are not reduced yet.

    Args:
        registry: knows all parameters of the strategy, in the order in which they came.
        As ``GradReducer``.

    Attributes:
        before_reducing: called where all workers reduce. See [Note: First values].
    """

    def __init__(
        self,
        replicas: Replicas,
        runner: Runner,
        reducer: Reducer,
        finite: NonFiniteCheck | None,
        registry: MirroredTensors,
    ) -> None:
        super().__init__(replicas, runner, reducer, finite)
        self._workers, self._registry = replicas.workers, registry
        trained_params.put(replicas, self)
        self.deferred = self._kept_back = Deferred()
        self._flights = InFlight(self._workers)
        self._known = self._outside = PassWeights(
            {}, None
        )  # those of the last run, and beside runs
        self._sequence: BucketOrder | None = None
        self._launching_hooks: list[Any] = []
        self._unfit = NonFinite(self._workers, finite)
        self._reduction = WorkerReduction(
            replicas, runner, reducer, self.watch, self._kept_back, self._flights, self._unfit
        )
        self._dropped = self._reduction.dropped
        self.before_reducing: Callable[[], None] = nothing

    # What passes count for

    def shares_in(self, run: RunView) -> PassWeights:
        """Returns what backward passes inside a run count for."""
        weights = run.weights()
        if not self._replicas.weighted:
            return PassWeights(dict.fromkeys(weights, 1.0), None)
        if self._known != weights:
            self._known = PassWeights(weights, float(sum(weights.values())))
        return self._known

    def equal_shares(self) -> PassWeights:
        """Returns what backward passes in the cross-replica context count for."""
        if not self._replicas.weighted:
            return PassWeights(super().equal_shares(), None)
        weight, known = self._workers.weight, self._outside
        if known.total != weight:
            known = PassWeights(dict.fromkeys(range(len(self.pending)), weight), weight)
            self._outside = known
        return known

    # What has arrived

    def has_arrived(self, replica_id: int) -> bool:
        """Whether backward passes have brought a replica what is not reduced."""
        if self.unsettled[replica_id]:
            self.watch.scan_replica(replica_id)
        return bool(self.pending[replica_id] or self._flights)

    def have_arrived(self) -> bool:
        """Whether backward passes have brought any replica what is not reduced."""
        if not (self.watch.may_have_arrived or any(self._noted)):
            return False
        self.watch.scan()
        return any(self.pending) or bool(self._flights)

    def drop(self, variable: ReplicatedParam, replicas: Iterable[int]) -> None:
        """Forgets what is elsewhere of a variable's gradients: deferred, or being reduced.

        Some workers may have launched its bucket and some not: all reduce what there is now.
        """
        self.watch.scan()
        if self.deferring or self.deferred:
            self.deferred.drop(variable, replicas)
            return
        if self._sequence is None or len(self._sequence.buckets) == 1:
            return  # nothing is launched before somebody looks
        replica = replica_of(self._replicas)
        if replica is not None and self.has_arrived(replica.replica_id):
            self._dropped.update((variable, r) for r in replicas)
            self.observe(replica)
        elif replica is None and self.have_arrived():
            self._dropped.update((variable, r) for r in replicas)
            self.flush()

    def forget(self, variable: ReplicatedParam) -> None:
        """Drops what is pending of a variable that is gone."""
        super().forget(variable)
        if self._sequence is not None:
            self._sequence.forget(variable)

    def discard(self) -> None:
        """Drops what is not reduced; the other workers hear of it if they wait for it."""
        self.watch.drop_interrupted()
        self.watch.find()
        was_there = bool(self._flights) or any(self.pending)
        for copies in self.pending:
            for copy in copies:
                set_local_grad(copy, None)
        self.watch.clear()
        self.watch.forget_streams()
        for unsettled in self.unsettled:
            unsettled.clear()
        self._dropped.clear()
        if was_there and self._sequence is not None and not (self.deferring or self.deferred):
            self._flights.abandon(self._sequence)

    # Launching beside a pass

    @disable_dynamo
    def _arrived(self, sequence: BucketOrder, index: int, copy: ReplicaParameter) -> None:
        """Launches a bucket if it is complete and its turn has come."""
        with self.watch.lock:
            if sequence is self._sequence and index == len(self._flights) and self._may_launch():
                with torch.inference_mode(False), torch.no_grad():
                    self._launch_beside(sequence.buckets[index])

    def _may_launch(self) -> bool:
        assert self._sequence is not None
        if self.deferring or self.deferred or self._dropped:
            return False
        if self._sequence.changes != self.watch.changes:
            return False
        if self.watch.streams is not None and len(self.pending) > 1:
            return False
        running = self._runner.running
        is_alone = running is None or running.lockstep.takes_turns
        return is_alone or not self.watch.may_be_in_second_pass()

    def _launch_beside(self, bucket: WorkerBucket) -> None:
        weights = self._weights_here()
        if weights is None or len(weights) < len(self.pending) or not all(weights.values()):
            return
        grads = [list(map(local_grad, mine)) for mine in bucket.copies]
        if not all(map(are_usual, grads)):
            return
        if self._unfit.are_non_finite(grads):
            return
        del grads  # who else holds them is about to be counted
        self.watch.remove(bucket.copies)
        if not self._flights:
            for unsettled in self.unsettled:
                unsettled.append(self._flights)
        columns = take(bucket.copies)
        self._reduction.launch(bucket, columns, self._reduction.estimated(weights), weights)

    def _weights_here(self) -> PassWeights | None:
        """Returns what a pass that goes on counts for; ``None`` where that is not sure."""
        replica, running = current.replica, self._runner.running
        if replica is None:
            return self.equal_shares() if running is None else None
        if replica.replicas is not self._replicas or running is None:
            return None
        return self.shares_in(running)

    # Reducing

    def reduce(self, shares: Mapping[int, float]) -> None:
        """Sums all workers' gradients into every replica's ``.grad``.

        Raises:
            DivergenceError: a worker is at another reduction, or has failed.
            GradientError: gradients of some worker are not finite, and that is looked for.
            StrategyError: they carry a graph.
        """
        assert isinstance(shares, PassWeights)
        self.before_reducing()
        self._replicas.timeline.begin(CROSS, REDUCTION, "gradients of all workers")
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                self._reduce_all(shares)
        else:
            self._reduce_all(shares)
        if self._kept_back.has_passes:
            self._kept_back.release()
        self._dropped.clear()
        self.watch.forget_streams()
        self._replicas.timeline.end(CROSS, REDUCTION)

    def _reduce_all(self, shares: PassWeights) -> None:
        is_enabled = torch.is_grad_enabled()
        set_grad_enabled(False)
        try:
            self._learn()
            has_sparse = False
            if self._sequence is not None:  # also before another is agreed on: some may be at it
                has_sparse = self._reduction.make(self._sequence, shares)
            if has_sparse or not self._fits():
                self._reduction.make(self._agree(shares.total or 0.0), shares)
        finally:
            set_grad_enabled(is_enabled)

    def _learn(self) -> ReadyGrads:
        """Notes in which order gradients have come, and does without hooks if as before."""
        arrived: Sequence[Sequence[ReplicaParameter]] = self.pending
        if self._flights:
            launched = self._flights.copies(len(self.pending))
            arrived = [[*on, *rest] for on, rest in zip(launched, self.pending, strict=True)]
        if self._arrivals is None or not self._arrivals.are_ready(arrived):
            self._arrivals = ReadyGrads(arrived)
        elif self._may_be_silent and self._arrivals.is_regular:
            self.watch.drop_hooks(self._arrivals)
        return self._arrivals

    def _fits(self) -> bool:
        """Whether there is a sequence of all that is trained now."""
        sequence, changes = self._sequence, self.watch.changes
        if sequence is None:
            return False
        if sequence.changes == changes:
            return True
        return sequence.fits(self._trained(), changes)

    def _trained(self) -> list[ReplicatedParam]:
        variables = map(param_of, self._registry.parameters())
        return [v for v in variables if v is not None and v.targets[0].requires_grad]

    @property
    def replicas(self) -> Replicas:
        """The replicas of this worker."""
        return self._replicas

    def smallest_trained(self) -> ReplicatedParam | None:
        """Returns the parameter with the fewest elements, ``None`` if none is trained."""
        return min(self._trained(), key=lambda v: v.targets[0].numel(), default=None)

    def _agree(self, weight: float) -> BucketOrder:
        """Agrees with the other workers on another sequence."""
        assert self._arrivals is not None
        arrived = self._arrivals.variables
        changes = self.watch.changes
        gc.collect()  # what is gone on some workers only
        known = [] if self._sequence is None else list(self._sequence.sparse)
        known += [v for v in self._kept_back if self._kept_back.is_sparse(v)]
        variables, sparse = agree(self._workers, self._trained(), arrived, weight, known)
        for hook in self._launching_hooks:
            hook.remove()
        self._sequence = sequence = BucketOrder(
            variables, sparse, changes, self._reducer, self._replicas.devices
        )
        self._launching_hooks = [
            mine[-1].watch(partial(self._arrived, sequence, index))
            for index, bucket in enumerate(sequence.buckets[:-1])  # nothing hides the last one
            for mine in bucket.copies
        ]
        return sequence

    def _defer(self, shares: Mapping[int, float]) -> None:
        assert isinstance(shares, PassWeights)
        with torch.inference_mode(False), torch.no_grad():
            arrivals = self._learn()
            columns = take(arrivals.copies)
            refuse_graphs(columns)
            self.watch.clear()
            self._unfit.scan(arrivals.variables, columns, shares)
            if self._unfit.is_looked_for:
                self._unfit.exchange()
            weigh(columns, self._reduction.exact(shares))
            self.deferred.add(arrivals.variables, columns)
        self._kept_back.has_passes = True
        self.watch.forget_streams()
