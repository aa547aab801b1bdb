"""WorkerReduction: sums the agreed buckets over all workers, and gives replicas the results."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from mirror.execution.replicas import Replicas
from mirror.execution.runner import Runner
from mirror.replica.collectives.reducer import Reducer
from mirror.replica.gradients.grad_tracker import GradTracker
from mirror.replica.gradients.non_finite import NonFinite
from mirror.replica.gradients.ready_grads import (
    ReplicaGrads,
    accumulate,
    local_grad,
    reduce_non_dense,
    run_hooks,
    set_local_grad,
    take,
)
from mirror.replica.multi_worker.in_flight import BucketInFlight, BucketOrder, InFlight
from mirror.replica.multi_worker.pass_weights import Deferred, PassWeights, SeveralCalls
from mirror.replica.multi_worker.worker_bucket import (
    IS_THERE,
    Contributions,
    Trailer,
    WorkerBucket,
    sum_sparse,
)
from mirror.replica.params.replicated_param import ReplicatedParam


class WorkerReduction:
    """The reductions of one strategy over all workers.

    Args:
        deferred: deferred gradients, which a reduction adds and removes.
        in_flight: the buckets that hooks have launched.
        non_finite: checks whether gradients are finite.

    Attributes:
        dropped: pairs of a variable and a replica; their reduced gradients are thrown away.
    """

    def __init__(
        self,
        replicas: Replicas,
        runner: Runner,
        reducer: Reducer,
        tracker: GradTracker,
        deferred: Deferred,
        in_flight: InFlight,
        non_finite: NonFinite,
    ) -> None:
        self._replicas, self._workers, self._runner = replicas, replicas.workers, runner
        self._tracker, self._deferred, self._in_flight, self._non_finite = (
            tracker,
            deferred,
            in_flight,
            non_finite,
        )
        self._several_calls = SeveralCalls(self._workers, runner)
        self._contributions = Contributions(replicas, reducer, deferred, tracker.streams)
        self._estimated: tuple[PassWeights | None, float, dict[int, float]] = None, 0.0, {}
        self._has_sparse = False
        self.dropped: set[tuple[ReplicatedParam, int]] = set()

    def reduce(self, order: BucketOrder, weights: PassWeights) -> bool:
        """Reduces all buckets, and repeats that until no worker has gradients left.

        Gradients are left if a second pass has filled slots of a bucket in flight.

        Returns:
            Whether a worker has set sparse gradients aside, which need another order.
        """
        self._has_sparse, more = False, True
        while more:
            more = self._reduce_once(order, weights)
        self._several_calls.forget()
        return self._has_sparse

    def _reduce_once(self, order: BucketOrder, weights: PassWeights) -> bool:
        """Reduces all buckets; returns whether a worker has gradients left."""
        # 1. Take the gradients out of their slots, and launch the remaining buckets.
        is_exact = self._deferred.has_passes
        shares: Mapping[int, float]
        shares = self.exact_shares(weights) if is_exact else self.estimate_shares(weights)
        try:
            sparse = self._take_sparse(order, shares) if order.sparse else []
            self._launch_rest(order, shares, weights)
        except BaseException:
            self._in_flight.abandon(order)
            raise
        # 2. Sum sparse gradients, and wait for the buckets.
        if order.sparse:
            sparse = sum_sparse(self._workers, sparse, order.sparse)
        self._tracker.clear()  # last, so that gradients are found again after an interrupt
        try:
            completed = self._in_flight.complete()
        finally:
            for unsettled in filter(None, self._tracker.unsettled):
                unsettled[:] = [one for one in unsettled if one is not self._in_flight]
        # 3. Act on the trailers.
        factor, least = 1.0, IS_THERE * self._workers.size
        unusual = [trailer for _, trailer in completed if trailer is not None]
        if unusual:
            factor, least = self._act_on(unusual, completed[0][1], weights, is_exact)
        # 4. Add the sums to every replica's gradients.
        self._runner.unfinished = True  # some replicas have it, some not: [Note: Interrupts]
        for flight, trailer in completed:
            self._accumulate(flight, trailer, factor, least)
        for variable, grad in zip(order.sparse, sparse, strict=True):
            if variable is not None and grad is not None and (variable, 0) not in self.dropped:
                reduce_non_dense(variable, [grad], factor)
        self._runner.unfinished = self._runner.running is not None
        last = completed[-1][1]
        return last is not None and bool(last.more)

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
        if any(trailer.non_finite for trailer in trailers):
            self._non_finite.exchange()
        self._has_sparse = self._has_sparse or any(trailer.sparse for trailer in trailers)
        if any(trailer.mixed for trailer in trailers):
            self._several_calls.compare()
        least = IS_THERE * self._workers.size
        if weights.total is None or is_exact or first is None:
            return 1.0, least
        if not first.weight:  # no worker has examples: all present gradients are zeros
            return 1.0, 0.0
        factor = self._reference() / first.weight
        self._workers.reference = first.weight
        return factor, least

    def _launch_rest(
        self, order: BucketOrder, shares: Mapping[int, float], weights: PassWeights
    ) -> None:
        num_launched, num_buckets = len(self._in_flight.launched), len(order.buckets)
        for index in range(num_launched, num_buckets):
            bucket = order.buckets[index]
            columns = take(bucket.copies)
            self._non_finite.scan(bucket.variables, columns, shares)
            is_last = index == num_buckets - 1
            more = is_last and num_launched > 0 and _are_left(order.buckets[:num_launched])
            self.launch(bucket, columns, shares, weights, more=more)

    def launch(
        self,
        bucket: WorkerBucket,
        columns: list[ReplicaGrads],
        shares: Mapping[int, float],
        weights: PassWeights,
        *,
        more: bool = False,
    ) -> None:
        """Launches a bucket with the weighted sum of the local replicas."""
        # Part of the mark: a worker that has skipped a pass is one run behind.
        phase = 0 if self._runner.running is None else self._workers.num_runs
        is_non_finite = self._non_finite.found is not None
        is_mixed = self._several_calls.differ(weights)
        is_usual = not (self._workers.sums_replicas or more or is_non_finite or is_mixed)
        if bucket.usual_trailers is not None and is_usual:
            scale = self._contributions.usual_scale(columns, shares)
            if scale is not None:
                self._in_flight.launch_usual(
                    bucket,
                    bucket.usual_trailers,
                    columns,
                    scale=scale,
                    weight=weights.total or 0.0,
                    total=0.0 if weights.total is None else self._reference(),
                    phase=phase,
                )
                return
        has_sparse = _set_sparse_aside(bucket, columns)
        if self._deferred:
            kept = [self._deferred.is_sparse(v) for v in bucket.variables if v is not None]
            has_sparse = has_sparse or any(kept)
        contribution = self._contributions.contribution_of(bucket, columns, shares)
        buffers = self._in_flight.launch(
            bucket,
            *contribution,
            weight=weights.total or 0.0,
            more=more,
            non_finite=is_non_finite,
            mixed=is_mixed,
            sparse=has_sparse,
            phase=phase,
        )
        if self._tracker.streams is not None and self._workers.sums_replicas:
            self._tracker.streams.keep(contribution.columns, [[buffer] for buffer in buffers])

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
            columns = [bucket.unpack(buffer) for buffer in buffers]
        else:
            columns = [flight.grads]
        for device in self._replicas.devices[len(buffers) :]:
            columns.append(bucket.unpack(buffers[0].to(device, copy=True)))
        targets: Sequence[list[Any]] = bucket.targets
        flags = bucket.all_count if trailer is None else trailer.flags
        variables = bucket.variables
        is_plain = not self.dropped and not [v for v in variables if v is None or v.hooks]
        if not is_plain or (trailer is not None and flags and min(flags) <= least):
            counted = [
                (i, variable)
                for i, (variable, flag) in enumerate(zip(variables, flags, strict=True))
                if variable is not None and flag > least
            ]
            columns = [[column[i] for i, _ in counted] for column in columns]
            targets = [[mine[i] for i, _ in counted] for mine in targets]
            run_hooks([variable for _, variable in counted], columns)
            for r in range(len(columns) if self.dropped else 0):
                kept = [j for j, (_, v) in enumerate(counted) if (v, r) not in self.dropped]
                columns[r] = [columns[r][j] for j in kept]
                targets[r] = [targets[r][j] for j in kept]
        for mine, reduced in zip(targets, columns, strict=True):
            accumulate(mine, reduced)

    def _take_sparse(self, order: BucketOrder, shares: Mapping[int, float]) -> list[Tensor | None]:
        """Takes this worker's contributions to sparse variables out of the slots."""
        grads = list[Tensor | None]()
        for variable in order.sparse:
            if variable is None:
                grads.append(None)
            else:
                columns = take([[copy] for copy in variable.copies])
                self._non_finite.scan([variable], columns, shares)
                grads.append(self._contributions.sparse_contribution(variable, columns, shares))
        return grads

    def _reference(self) -> float:
        return self._workers.reference or 1.0

    def estimate_shares(self, weights: PassWeights) -> dict[int, float]:
        """Returns shares in the previous total, which all workers know.

        The reduced gradients are corrected by the exact total.
        """
        reference, known = self._reference(), self._estimated
        if known[0] is not weights or known[1] != reference:
            known = self._estimated = weights, reference, weights.shares(reference)
        return known[2]

    def exact_shares(self, weights: PassWeights) -> dict[int, float]:
        """Returns shares in the total of this pass, which the workers exchange."""
        if weights.total is None:
            return dict(weights)
        mine = struct.pack("<d", weights.total)
        messages = self._workers.exchange("the weights of a pass", None, lambda: mine)
        return weights.shares(sum(struct.unpack("<d", message)[0] for message in messages))


def _set_sparse_aside(bucket: WorkerBucket, columns: Sequence[ReplicaGrads]) -> bool:
    """Puts sparse gradients back, which a bucket has no place for; whether there are any."""
    found = False
    for copies, column in zip(bucket.copies, columns, strict=True):
        for i, grad in enumerate(column):
            if grad is not None and grad.is_sparse:
                set_local_grad(copies[i], grad)
                column[i], found = None, True
    return found


def _are_left(buckets: Sequence[WorkerBucket]) -> bool:
    """Whether slots of launched buckets contain gradients again."""
    for bucket in buckets:
        for mine in bucket.copies:
            for grad in map(local_grad, mine):  # a generator costs a call for each gradient
                if grad is not None:
                    return True
    return False
