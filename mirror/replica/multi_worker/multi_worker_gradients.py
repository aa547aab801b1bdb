"""MultiWorkerGradients: gradients of several workers' replicas, reduced in agreed buckets.

Each worker sums its replicas' gradients on their devices. The sums travel in one buffer per
bucket, and are copied to all replicas. No thread is needed: sums of torch.distributed are
asynchronous. A hook launches a bucket during the pass, and the first use of a gradient waits. When
buckets travel is explained in ``in_flight.py``; how passes are weighted, by
[Note: Shares of workers] in ``pass_weights.py``.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from mirror.base.dynamo import disable_dynamo
from mirror.base.timeline import CROSS, REDUCTION
from mirror.execution.lifecycle import do_nothing
from mirror.execution.replicas import Replicas
from mirror.execution.run import Run, current, replica_of
from mirror.execution.runner import Runner
from mirror.replica.collectives.reducer import Reducer
from mirror.replica.gradients.grad_reducer import GradReducer
from mirror.replica.gradients.non_finite import NonFinite, NonFiniteCheck
from mirror.replica.gradients.ready_grads import (
    ReadyGrads,
    are_usual,
    local_grad,
    set_local_grad,
    take,
    weigh,
)
from mirror.replica.multi_worker.in_flight import BucketOrder, InFlight, agree
from mirror.replica.multi_worker.pass_weights import Deferred, PassWeights
from mirror.replica.multi_worker.worker_bucket import WorkerBucket, refuse_graphs
from mirror.replica.multi_worker.worker_reduction import WorkerReduction
from mirror.replica.params.replicated_param import ReplicaParameter, ReplicatedParam
from mirror.replica.params.replicated_params import MirroredTensors, param_of
from mirror.replica.params.workers_without_examples import trained_params


class MultiWorkerGradients(GradReducer):
    """The gradients of this worker's replicas that are not reduced yet.

    Args:
        registry: all parameters of the strategy, in the order of registration.
        replicas, runner, reducer, finite: as in ``GradReducer``.

    Attributes:
        wait_for_reduce: called before each reduction, by all workers: [Note: First values].
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
        self.deferred = self._deferred = Deferred()
        self._in_flight = InFlight(self._workers)
        self._launched = self._in_flight.launched
        # Cached weights of the last run, and of passes outside run.
        self._run_weights = self._outside_weights = PassWeights({}, None)
        self._order: BucketOrder | None = None
        self._launching_hooks: list[Any] = []
        self._non_finite = NonFinite(self._workers, finite)
        self._reduction = WorkerReduction(
            replicas,
            runner,
            reducer,
            self.tracker,
            self._deferred,
            self._in_flight,
            self._non_finite,
        )
        self._dropped = self._reduction.dropped
        self.wait_for_reduce: Callable[[], None] = do_nothing

    # Weights of passes

    def shares_in(self, run: Run) -> PassWeights:
        """Returns the weights of backward passes inside a run."""
        weights = run.weights()
        if not self._replicas.weighted:
            return PassWeights(dict.fromkeys(weights, 1.0), None)
        if self._run_weights != weights:
            self._run_weights = PassWeights(weights, float(sum(weights.values())))
        return self._run_weights

    def equal_shares(self) -> PassWeights:
        """Returns the weights of backward passes in the cross-replica context."""
        if not self._replicas.weighted:
            shares = super().equal_shares()
            return PassWeights(
                shares if self._workers.weight else dict.fromkeys(shares, 0.0), None
            )
        weight, known = self._workers.weight, self._outside_weights
        if known.total != weight:
            known = PassWeights(dict.fromkeys(range(len(self.pending)), weight), weight)
            self._outside_weights = known
        return known

    # Gradients that have arrived

    def has_arrived(self, replica_id: int) -> bool:
        """Whether a replica has unreduced gradients from backward passes."""
        if self.unsettled[replica_id]:
            self.tracker.scan_replica(replica_id)
        return bool(self.pending[replica_id] or self._launched)

    def have_arrived(self) -> bool:
        """Whether any replica has unreduced gradients from backward passes."""
        if not (self.tracker.may_have_arrived or any(self._sources)):
            return False
        self.tracker.scan()
        return any(self.pending) or bool(self._launched)

    def drop(self, variable: ReplicatedParam, replicas: Iterable[int]) -> None:
        """Drops a variable's unreduced gradients, for these replicas.

        Only some workers may have launched its bucket, so all workers reduce now.
        """
        self.tracker.drop_local(variable, replicas)
        if self.deferring or self.deferred:
            self.deferred.drop(variable, replicas)
            return
        if self._order is None or len(self._order.buckets) == 1:
            return  # hooks launch all buckets but the last, so there is none in flight
        replica = replica_of(self._replicas)
        if replica is not None and self.has_arrived(replica.replica_id):
            self._dropped.update((variable, r) for r in replicas)
            self.observe(replica)
        elif replica is None and self.have_arrived():
            self._dropped.update((variable, r) for r in replicas)
            self.flush()

    def forget(self, variable: ReplicatedParam) -> None:
        """Drops the pending gradients of a variable that was freed."""
        super().forget(variable)
        if self._order is not None:
            self._order.forget(variable)

    def discard(self) -> None:
        """Drops all gradients that are not reduced; workers that wait for them get an error."""
        self.tracker.drop_interrupted()
        self.tracker.find()
        was_there = bool(self._launched) or any(self.pending)
        for copies in self.pending:
            for copy in copies:
                set_local_grad(copy, None)
        self.tracker.clear()
        self.tracker.forget_streams()
        for unsettled in self.unsettled:
            unsettled.clear()
        self._dropped.clear()
        if was_there and self._order is not None and not (self.deferring or self.deferred):
            self._in_flight.abandon(self._order)

    # Launching during a pass

    @disable_dynamo
    def _handle_arrival(self, order: BucketOrder, index: int, copy: ReplicaParameter) -> None:
        """Launches a bucket if it is complete and its turn has come."""
        lock = self.tracker.mutex.lock
        try:
            lock.acquire()
            if order is self._order and index == len(self._launched) and self._may_launch():
                with torch.inference_mode(False), torch.no_grad():
                    self._launch_in_pass(order.buckets[index])
        finally:
            try:  # noqa: SIM105
                lock.release()
            except RuntimeError:  # see Mutex
                pass

    def _may_launch(self) -> bool:
        assert self._order is not None
        if self.deferring or self.deferred or self._dropped:
            return False
        if self._order.changes != self.tracker.changes:
            return False
        streams = self.tracker.streams
        if streams is not None and (streams.are_mixed or len(self.pending) > 1):
            return False
        running = self._runner.running
        is_alone = running is None or running.lockstep.takes_turns
        return is_alone or not self.tracker.may_be_in_second_pass()

    def _launch_in_pass(self, bucket: WorkerBucket) -> None:
        weights = self._current_weights()
        if weights is None or len(weights) < len(self.pending) or not all(weights.values()):
            return
        grads = [list(map(local_grad, mine)) for mine in bucket.copies]
        if not all(map(are_usual, grads)):
            return
        if self._non_finite.are_non_finite(grads):
            return
        del grads  # unshare counts the references to their memory
        self.tracker.remove(bucket.copies)
        if not self._launched:
            for unsettled in self.unsettled:
                unsettled.append(self._in_flight)
        columns = take(bucket.copies)
        self._reduction.launch(bucket, columns, self._reduction.estimate_shares(weights), weights)

    def _current_weights(self) -> PassWeights | None:
        """Returns the weights of the running pass; ``None`` if they are not certain."""
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
            GradientError: a gradient of some worker is not finite, and that is checked.
            StrategyError: a gradient carries a graph.
        """
        assert isinstance(shares, PassWeights)
        self.wait_for_reduce()
        self._replicas.timeline.begin(CROSS, REDUCTION, "gradients of all workers")
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                self._reduce_all(shares)
        else:
            self._reduce_all(shares)
        if self._deferred.has_passes:
            self._deferred.release()
        self._dropped.clear()
        self.tracker.forget_streams()
        self._replicas.timeline.end(CROSS, REDUCTION)

    def _reduce_all(self, shares: PassWeights) -> None:
        is_enabled = torch.is_grad_enabled()
        torch.set_grad_enabled(False)
        try:
            self._learn()
            has_sparse = False
            # With the old order first, even if a new one is needed: workers may have launched.
            if self._order is not None:
                has_sparse = self._reduction.reduce(self._order, shares)
            if has_sparse or not self._fits():
                self._reduction.reduce(self._agree(shares.total or 0.0), shares)
        finally:
            torch.set_grad_enabled(is_enabled)

    def _learn(self) -> ReadyGrads:
        """Records the order of arrival; removes the hooks if it is the same as before."""
        arrived: Sequence[Sequence[ReplicaParameter]] = self.pending
        if self._launched:
            launched = self._in_flight.copies(len(self.pending))
            arrived = [[*on, *rest] for on, rest in zip(launched, self.pending, strict=True)]
        if self._arrivals is None or not self._arrivals.are_ready(arrived):
            self._arrivals = ReadyGrads(arrived)
        elif self._may_be_silent and self._arrivals.is_regular:
            self.tracker.drop_hooks(self._arrivals)
        return self._arrivals

    def _fits(self) -> bool:
        """Whether the order contains all variables that are trained now."""
        order, changes = self._order, self.tracker.changes
        if order is None:
            return False
        if order.changes == changes:
            return True
        return order.fits(self._find_trained(), changes)

    def _find_trained(self) -> list[ReplicatedParam]:
        variables = map(param_of, self._registry.parameters())
        return [v for v in variables if v is not None and v.targets[0].requires_grad]

    @property
    def replicas(self) -> Replicas:
        """The replicas of this worker."""
        return self._replicas

    def smallest_trained(self) -> ReplicatedParam | None:
        """Returns the parameter with the fewest elements, ``None`` if none is trained."""
        return min(self._find_trained(), key=lambda v: v.targets[0].numel(), default=None)

    def _agree(self, weight: float) -> BucketOrder:
        """Agrees with the other workers on a new order."""
        assert self._arrivals is not None
        arrived = self._arrivals.variables
        changes = self.tracker.changes
        gc.collect()  # frees on all workers what some have freed
        known = [] if self._order is None else list(self._order.sparse)
        known += [v for v in self._deferred if self._deferred.is_sparse(v)]
        variables, sparse = agree(self._workers, self._find_trained(), arrived, weight, known)
        for hook in self._launching_hooks:
            hook.remove()
        self._order = order = BucketOrder(
            variables, sparse, changes, self._reducer, self._replicas.devices
        )
        self._launching_hooks = [
            mine[-1].on_accumulate(partial(self._handle_arrival, order, index))
            for index, bucket in enumerate(order.buckets[:-1])  # nothing hides the last one
            for mine in bucket.copies
        ]
        return order

    def _defer(self, shares: Mapping[int, float]) -> None:
        assert isinstance(shares, PassWeights)
        with torch.inference_mode(False), torch.no_grad():
            arrivals = self._learn()
            columns = take(arrivals.copies)
            refuse_graphs(columns)
            self.tracker.clear()
            self._non_finite.scan(arrivals.variables, columns, shares)
            if self._non_finite.is_enabled:
                self._non_finite.exchange()
            weigh(columns, self._reduction.exact_shares(shares))
            self.deferred.add(arrivals.variables, columns)
        self._deferred.has_passes = True
        self.tracker.forget_streams()
