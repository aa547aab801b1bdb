"""WorkerReduction: reduces gradients over the replicas of all workers, in agreed buckets.

Each worker sums its replicas' gradients on their devices: ``contributions.py``. The sums travel in
one buffer per bucket, and are copied to all replicas. No thread is needed: sums of
torch.distributed are asynchronous. A hook launches a bucket during the pass, and the first use of
a gradient waits.

    1. launch      each bucket but the last, once it is full and all before it are launched
    2. take        the gradients of the other buckets, and sparse ones, at the first use of one
    3. wait        until all buckets have travelled
    4. act         on their trailers: an error of a worker, the total of all weights
    5. accumulate  the sums to every replica's ``.grad``
    6. agree       on an order of buckets, if there is none or it does not fit; then from 2

When buckets travel is explained in ``bucket_order.py``; how passes are weighted, by
[Note: Shares of workers] in ``gradients/shares.py``.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mirror.base.dynamo import disable_dynamo
from mirror.base.timeline import CROSS, REDUCTION
from mirror.execution.lifecycle import do_nothing
from mirror.execution.replicas import Replicas
from mirror.execution.run import replica_of
from mirror.execution.runner import Runner
from mirror.replica.gradients.grad_scatter import GradScatter
from mirror.replica.gradients.grad_tracker import GradTracker
from mirror.replica.gradients.non_finite import NonFinite, NonFiniteCheck
from mirror.replica.gradients.ready_grads import (
    DeferredGrads,
    ReadyGrads,
    Reducer,
    ReplicaGrads,
    accumulate,
    local_grad,
    reduce_non_dense,
    run_hooks,
    set_local_grad,
    take,
    weigh,
)
from mirror.replica.gradients.shares import PassWeights, SeveralCalls, Shares
from mirror.replica.multi_worker.bucket_order import BucketOrder, agree
from mirror.replica.multi_worker.contributions import Contributions, refuse_graphs, sum_sparse
from mirror.replica.multi_worker.in_flight import BucketInFlight, InFlight
from mirror.replica.multi_worker.worker_bucket import (
    FLAG_ZERO_WEIGHT,
    Signals,
    Trailer,
    WorkerBucket,
)
from mirror.replica.params.replicated_param import ReplicaParameter, ReplicatedParam
from mirror.replica.params.replicated_params import MirroredTensors, param_of
from mirror.replica.params.workers_without_examples import trained_params


class WorkerReduction:
    """Reduces the gradients of the replicas of several workers: see ``Reduction``.

    Args:
        finite: checks whether gradients are finite; ``None`` for no check.
        registry: all parameters of the strategy, in the order of registration.

    Attributes:
        replicas: the replicas of this worker.
        wait_for_reduce: called before each reduction, by all workers: [Note: First values].
    """

    scatter: GradScatter | None = None  # workers sum whole gradients: [Note: Scattered gradients]

    def __init__(
        self,
        replicas: Replicas,
        runner: Runner,
        reducer: Reducer,
        shares: Shares,
        finite: NonFiniteCheck | None,
        registry: MirroredTensors,
    ) -> None:
        self.replicas, self._workers, self._runner = replicas, replicas.workers, runner
        self._reducer, self._shares, self._registry = reducer, shares, registry
        self.bytes_per_pack = reducer.bytes_per_pack
        self.tracker, self.deferred = GradTracker(replicas), DeferredGrads(is_multi_process=True)
        self._contributions = Contributions(replicas, reducer, self.deferred, self.tracker.streams)
        self._transfers = InFlight(self._workers, self.tracker)
        self._finite, self._non_finite = finite, NonFinite(self._workers, finite)
        self._several_calls = SeveralCalls(replicas, runner)
        self._order: BucketOrder | None = None
        self._hooks: list[Any] = []
        self._has_sparse = False  # whether a worker has set sparse gradients aside
        self._dropped: set[tuple[ReplicatedParam, int]] = set()
        self.wait_for_reduce: Callable[[], None] = do_nothing
        trained_params.put(replicas, self)

    # Launching during a pass

    @disable_dynamo
    def _handle_arrival(self, order: BucketOrder, index: int, copy: ReplicaParameter) -> None:
        """Launches a bucket if it is complete and its turn has come."""
        self.tracker.mutex.call(self._launch_if_due, order, index)

    def _launch_if_due(self, order: BucketOrder, index: int) -> None:
        is_next = order is self._order and index == len(self.tracker.in_flight)
        if is_next and self._may_launch(order):
            with torch.inference_mode(False), torch.no_grad():
                self._launch_in_pass(order.buckets[index])

    def _may_launch(self, order: BucketOrder) -> bool:
        if self.deferred.is_open or self.deferred.has_passes or self._dropped:
            return False
        if order.changes != self.tracker.changes or not order.matches():
            return False
        streams = self.tracker.streams
        if streams is not None and (streams.are_mixed or len(self.tracker.pending) > 1):
            return False
        running = self._runner.running
        is_alone = running is None or running.lockstep.takes_turns
        return is_alone or not self.tracker.may_be_in_second_pass()

    def _launch_in_pass(self, bucket: WorkerBucket) -> None:
        weights = self._shares.of_all()
        if weights is None:
            return
        by_replica = self.tracker.take_complete(bucket.copies, self._finite)
        if by_replica is not None:
            self._launch(bucket, by_replica, self._shares.estimate(weights), weights)

    # Reducing

    def reduce(self, weights: PassWeights) -> None:
        """Sums all workers' gradients into every replica's ``.grad``.

        Raises:
            DivergenceError: a worker is at another reduction, or has failed.
            GradientError: a gradient of some worker is not finite, and that is checked.
            StrategyError: a gradient carries a graph.
        """
        self.wait_for_reduce()
        self.replicas.timeline.begin(CROSS, REDUCTION, "gradients of all workers")
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                self._reduce_all(weights)
        else:
            self._reduce_all(weights)
        if self.deferred.has_passes:
            self.deferred.release()
        self._dropped.clear()
        if self.tracker.streams is not None:
            self.tracker.forget_streams()
        self.replicas.timeline.end(CROSS, REDUCTION)

    def _reduce_all(self, weights: PassWeights) -> None:
        is_enabled = torch.is_grad_enabled()
        torch.set_grad_enabled(False)
        try:
            arrivals, _ = self.tracker.record_arrival_order()
            self._has_sparse = False
            # With the old order first, even if a new one is needed: workers may have launched.
            if self._order is not None and not (self.tracker.in_flight or self._order.matches()):
                self._order = None  # model.double(), say, on all workers
            if self._order is not None:
                self._reduce_in(self._order, weights)
            if self._has_sparse or not self._fits():
                self._reduce_in(self._agree(arrivals, weights.total or 0.0), weights)
        finally:
            torch.set_grad_enabled(is_enabled)

    def _reduce_in(self, order: BucketOrder, weights: PassWeights) -> None:
        """Reduces all buckets, and repeats that until no worker has gradients left.

        Gradients are left if a second pass has filled slots of a bucket in flight.
        """
        while self._reduce_once(order, weights):
            pass
        self._several_calls.forget()

    def _reduce_once(self, order: BucketOrder, weights: PassWeights) -> bool:
        """Reduces all buckets; returns whether a worker has gradients left."""
        # 2. Take the gradients out of their slots, and launch the remaining buckets.
        is_exact = self.deferred.has_passes
        shares = self._shares.exchange(weights) if is_exact else self._shares.estimate(weights)
        try:
            sparse = self._take_sparse(order, shares) if order.sparse else []
            self._launch_rest(order, shares, weights)
        except BaseException:
            self._transfers.abandon(order)
            raise
        # 3. Sum sparse gradients, and wait for the buckets.
        if order.sparse:
            sparse = sum_sparse(self._workers, sparse, order.sparse)
        self.tracker.clear()  # last, so that gradients are found again after an interrupt
        completed = self._transfers.complete()
        # 4. Act on the trailers.
        factor, least = 1.0, FLAG_ZERO_WEIGHT * self._workers.size
        unusual = [trailer for _, trailer in completed if trailer is not None]
        if unusual:
            factor, least = self._act_on(unusual, completed[0][1], weights, is_exact)
        # 5. Add the sums to every replica's gradients.
        self._runner.unfinished = True  # some replicas have it, some not: [Note: Interrupts]
        for flight, trailer in completed:
            self._accumulate(flight, trailer, factor, least)
        for variable, grad in zip(order.sparse, sparse, strict=True):
            if variable is not None and grad is not None and (variable, 0) not in self._dropped:
                reduce_non_dense(variable, [grad], factor)
        self._runner.unfinished = self._runner.running is not None
        last = completed[-1][1]
        return last is not None and bool(last.signals.more)

    def _take_sparse(self, order: BucketOrder, shares: Mapping[int, float]) -> list[Tensor | None]:
        """Takes this worker's contributions to sparse variables out of the slots."""
        contributions = list[Tensor | None]()
        for variable in order.sparse:
            if variable is None:
                contributions.append(None)
            else:
                grads = take([[copy] for copy in variable.copies])
                self._non_finite.scan([variable], grads, shares)
                contributions.append(self._contributions.of_sparse(variable, grads, shares))
        return contributions

    def _launch_rest(
        self, order: BucketOrder, shares: Mapping[int, float], weights: PassWeights
    ) -> None:
        num_launched, num_buckets = len(self.tracker.in_flight), len(order.buckets)
        for index in range(num_launched, num_buckets):
            bucket = order.buckets[index]
            by_replica = take(bucket.copies)
            self._non_finite.scan(bucket.variables, by_replica, shares)
            is_last = index == num_buckets - 1
            more = is_last and num_launched > 0 and _are_left(order.buckets[:num_launched])
            self._launch(bucket, by_replica, shares, weights, more=more)

    def _launch(
        self,
        bucket: WorkerBucket,
        by_replica: list[ReplicaGrads],
        shares: Mapping[int, float],
        weights: PassWeights,
        *,
        more: bool = False,
    ) -> None:
        """Launches a bucket with the weighted sum of the local replicas."""
        # Part of the mark: a worker that has skipped a pass is one run behind.
        phase = 0 if self._runner.running is None else self._workers.num_runs
        weight = weights.total or 0.0
        is_non_finite = self._non_finite.found is not None
        is_mixed = self._several_calls.differ(weights)
        is_usual = not (self._workers.sums_replicas or more or is_non_finite or is_mixed)
        if bucket.can_sum_replicas and is_usual:
            scale = self._contributions.usual_scale(by_replica, shares)
            if scale is not None:
                self._transfers.launch_usual(
                    bucket,
                    by_replica,
                    scale=scale,
                    weight=weight,
                    total=0.0 if weights.total is None else self._shares.reference,
                    phase=phase,
                )
                return
        has_sparse = _set_sparse_aside(bucket, by_replica)
        if self.deferred.has_passes:
            kept = [self.deferred.is_sparse(v) for v in bucket.variables if v is not None]
            has_sparse = has_sparse or any(kept)
        contribution = self._contributions.of_bucket(bucket, by_replica, shares)
        signals = Signals(
            weight, more, non_finite=is_non_finite, mixed=is_mixed, sparse=has_sparse
        )
        buffers = self._transfers.launch(bucket, contribution, signals, phase=phase)
        if self.tracker.streams is not None and self._workers.sums_replicas:
            self.tracker.streams.keep(contribution.by_replica, [[buffer] for buffer in buffers])

    def _act_on(
        self,
        trailers: Sequence[Trailer],
        first: Trailer | None,
        weights: PassWeights,
        is_exact: bool,
    ) -> tuple[float, float]:
        """Acts on unusual trailers: raises, warns, and corrects the total of all weights.

        Args:
            first: the trailer of the first bucket, if it is unusual.

        Returns:
            The factor for the reduced gradients, and the largest flag at which a variable's
            ``.grad`` stays unchanged.

        Raises:
            GradientError: a worker has found a gradient that is not finite.
        """
        if any(trailer.signals.non_finite for trailer in trailers):
            self._non_finite.exchange()
        if any(trailer.signals.sparse for trailer in trailers):
            self._has_sparse = True
        if any(trailer.signals.mixed for trailer in trailers):
            self._several_calls.compare()
        if weights.total is None or is_exact or first is None:
            return 1.0, FLAG_ZERO_WEIGHT * self._workers.size
        if not first.signals.weight:  # no worker has examples: all present gradients are zeros
            return 1.0, 0.0
        factor = self._shares.correct(first.signals.weight)
        return factor, FLAG_ZERO_WEIGHT * self._workers.size

    def _accumulate(
        self, flight: BucketInFlight, trailer: Trailer | None, factor: float, least: float
    ) -> None:
        """Adds the reduced gradients of a bucket to every replica's ``.grad``."""
        bucket, buffers = flight.bucket, list(flight.buffers)
        for r, buffer in enumerate(buffers):
            if buffer.dtype != bucket.dtype:
                buffers[r] = buffer.to(bucket.dtype)
            if factor != 1.0:
                buffers[r].mul_(factor)
        if flight.grads is None:
            by_replica = [bucket.unpack(buffer) for buffer in buffers]
        else:
            by_replica = [flight.grads]
        for device in self.replicas.devices[len(buffers) :]:
            by_replica.append(bucket.unpack(buffers[0].to(device, copy=True)))
        targets: Sequence[list[Any]] = bucket.targets
        flags = bucket.all_count if trailer is None else trailer.flags
        variables = bucket.variables
        is_plain = not self._dropped and not [v for v in variables if v is None or v.hooks]
        if not is_plain or (trailer is not None and flags and min(flags) <= least):
            counted = [
                (i, variable)
                for i, (variable, flag) in enumerate(zip(variables, flags, strict=True))
                if variable is not None and flag > least
            ]
            by_replica = [[grads[i] for i, _ in counted] for grads in by_replica]
            targets = [[mine[i] for i, _ in counted] for mine in targets]
            run_hooks([variable for _, variable in counted], by_replica)
            for r in range(len(targets) if self._dropped else 0):
                kept = [j for j, (_, v) in enumerate(counted) if (v, r) not in self._dropped]
                by_replica[r] = [by_replica[r][j] for j in kept]
                targets[r] = [targets[r][j] for j in kept]
        for mine, reduced in zip(targets, by_replica, strict=True):
            accumulate(mine, reduced)

    # Agreeing on an order

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

    def smallest_trained(self) -> ReplicatedParam | None:
        """Returns the parameter with the fewest elements, ``None`` if none is trained."""
        return min(self._find_trained(), key=lambda v: v.targets[0].numel(), default=None)

    def _agree(self, arrivals: ReadyGrads, weight: float) -> BucketOrder:
        """Agrees with the other workers on a new order."""
        changes = self.tracker.changes
        gc.collect()  # frees on all workers what some have freed
        known = [] if self._order is None else list(self._order.sparse)
        known += [v for v in self.deferred if self.deferred.is_sparse(v)]
        trained = self._find_trained()
        variables, sparse, total = agree(self._workers, trained, arrivals.variables, weight, known)
        if not self._shares.reference:
            self._shares.reference = total
        for hook in self._hooks:
            hook.remove()
        self._order = order = BucketOrder(
            variables, sparse, changes, self._reducer, self.replicas.devices
        )
        self._hooks = [
            mine[-1].on_accumulate(partial(self._handle_arrival, order, index))
            for index, bucket in enumerate(order.buckets[:-1])  # nothing hides the last one
            for mine in bucket.copies
        ]
        return order

    def order_of_arrival(self) -> Sequence[ReplicatedParam]:
        """Returns the variables in the order on which the workers have agreed, if any."""
        buckets = [] if self._order is None else self._order.buckets
        return [v for bucket in buckets for v in bucket.variables if v is not None]

    def pack(self, variables: Sequence[ReplicatedParam]) -> None:
        """Returns ``None``: gradients of several workers are moved before they are reduced."""

    # Deferring and dropping

    def defer(self, weights: PassWeights) -> None:
        """Moves the local gradients, weighted, to ``deferred``."""
        with torch.inference_mode(False), torch.no_grad():
            arrivals, _ = self.tracker.record_arrival_order()
            by_replica = take(arrivals.copies)
            refuse_graphs(by_replica)
            self.tracker.clear()
            self._non_finite.scan(arrivals.variables, by_replica, weights)
            if self._non_finite.is_enabled:
                self._non_finite.exchange()
            weigh(by_replica, self._shares.exchange(weights))
            self.deferred.add(arrivals.variables, by_replica)
        self.tracker.forget_streams()

    def drop(self, variable: ReplicatedParam, replica_ids: Sequence[int]) -> bool:
        """Drops a variable's unreduced gradients, for these replicas.

        Returns:
            Whether all must reduce now, to drop the sum: only some may have launched its bucket.
        """
        self.tracker.drop_local(variable, replica_ids)
        if self.deferred.is_open or self.deferred.has_passes:
            self.deferred.drop(variable, replica_ids)
            return False
        if self._order is None or len(self._order.buckets) == 1:
            return False  # hooks launch all buckets but the last, so there is none in flight
        replica = replica_of(self.replicas)
        if replica is None:
            must_reduce = self.tracker.have_arrived()
        else:
            must_reduce = self.tracker.has_arrived(replica.replica_id)
        if must_reduce:
            self._dropped.update((variable, r) for r in replica_ids)
        return must_reduce

    def discard(self) -> None:
        """Drops all gradients that are not reduced; workers that wait for them get an error."""
        was_there = self.tracker.discard() or bool(self.tracker.in_flight)
        self._dropped.clear()
        is_deferring = self.deferred.is_open or self.deferred.has_passes
        if was_there and self._order is not None and not is_deferring:
            self._transfers.abandon(self._order)

    def forget(self, variable: ReplicatedParam) -> None:
        """Drops a variable that was freed; takes no lock."""
        if self._order is not None:
            self._order.forget(variable)

    def close(self) -> None:
        """Does nothing: there are no streams."""


def _set_sparse_aside(bucket: WorkerBucket, by_replica: Sequence[ReplicaGrads]) -> bool:
    """Puts sparse gradients back, which a bucket has no place for; whether there are any."""
    found = False
    for copies, grads in zip(bucket.copies, by_replica, strict=True):
        for i, grad in enumerate(grads):
            if grad is not None and grad.is_sparse:
                set_local_grad(copies[i], grad)
                grads[i], found = None, True
    return found


def _are_left(buckets: Sequence[WorkerBucket]) -> bool:
    """Whether slots of launched buckets contain gradients again."""
    for bucket in buckets:
        for mine in bucket.copies:
            for grad in map(local_grad, mine):  # a generator costs a call for each gradient
                if grad is not None:
                    return True
    return False
