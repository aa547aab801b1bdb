"""Reduction: the agreed sequence, summed over all workers, and what arrives given to replicas."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from mirror.execution.replicas import Replicas
from mirror.execution.runner import Runner
from mirror.replica.collectives.packed_reducer import Reducer
from mirror.replica.gradients.grad_hooks import run_hooks
from mirror.replica.gradients.grad_tracker import GradTracker
from mirror.replica.gradients.ready_grads import (
    ReplicaGrads,
    accumulate,
    local_grad,
    reduce_non_dense,
    set_local_grad,
    take,
)
from mirror.replica.multi_worker.bucket_order import BucketOrder
from mirror.replica.multi_worker.contributions import Contributions
from mirror.replica.multi_worker.in_flight import BucketInFlight, InFlight
from mirror.replica.multi_worker.pass_weights import Deferred, PassWeights
from mirror.replica.multi_worker.several_calls import SeveralCalls
from mirror.replica.multi_worker.trailer import IS_THERE, Trailer
from mirror.replica.multi_worker.worker_bucket import WorkerBucket, sum_sparse
from mirror.replica.multi_worker.worker_non_finite import NonFinite
from mirror.replica.params.replicated_param import ReplicatedParam


class WorkerReduction:
    """Makes the reductions of one strategy.

    Args:
        kept_back: what is added to the gradients of a pass, and let go.
        flights: the buckets that are on their way already.
        unfit: what looks whether gradients are finite.

    Attributes:
        dropped: what nobody wants any more, by variable and replica.
    """

    def __init__(
        self,
        replicas: Replicas,
        runner: Runner,
        reducer: Reducer,
        watch: GradTracker,
        kept_back: Deferred,
        flights: InFlight,
        unfit: NonFinite,
    ) -> None:
        self._replicas, self._workers, self._runner = replicas, replicas.workers, runner
        self._watch, self._kept_back, self._flights, self._unfit = watch, kept_back, flights, unfit
        self._several_calls = SeveralCalls(self._workers, runner)
        self._summands = Contributions(replicas, reducer, kept_back, watch.streams)
        self._estimated: tuple[PassWeights | None, float, dict[int, float]] = None, 0.0, {}
        self._has_sparse = False
        self.dropped: set[tuple[ReplicatedParam, int]] = set()

    def make(self, sequence: BucketOrder, weights: PassWeights) -> bool:
        """Reduces a sequence until no worker has gradients left, of a second pass.

        Returns:
            Whether a worker has set sparse gradients aside, which wait for another sequence.
        """
        self._has_sparse, more = False, True
        while more:
            more = self._once(sequence, weights)
        self._several_calls.forget()
        return self._has_sparse

    def _once(self, sequence: BucketOrder, weights: PassWeights) -> bool:
        is_exact = self._kept_back.has_passes
        shares: Mapping[int, float]
        shares = self.exact(weights) if is_exact else self.estimated(weights)
        try:
            rows = self._take_rows(sequence, shares)
            self._launch_rest(sequence, shares, weights)
        except BaseException:
            self._flights.abandon(sequence)
            raise
        if sequence.sparse:
            rows = sum_sparse(self._workers, rows, sequence.sparse)
        self._watch.clear()  # last: what an interrupt has left in the slots is found again
        landed = self._complete()
        factor, least = 1.0, IS_THERE * self._workers.size
        if any(tail is not None for _, tail in landed):
            factor, least = self._handle(landed, weights, is_exact)
        self._runner.unfinished = True  # while some have it: see [Note: Interrupts]
        for flight, tail in landed:
            self._accumulate(flight, tail, factor, least)
        for variable, row in zip(sequence.sparse, rows, strict=True):
            if variable is not None and row is not None and (variable, 0) not in self.dropped:
                reduce_non_dense(variable, [row], factor)
        self._runner.unfinished = self._runner.running is not None
        last = landed[-1][1]
        return last is not None and bool(last.more)

    def _handle(
        self,
        landed: Sequence[tuple[BucketInFlight, Trailer | None]],
        weights: PassWeights,
        is_exact: bool,
    ) -> tuple[float, float]:
        """Does what tails say; returns a factor for what has arrived, and the least flag."""
        tails = [tail for _, tail in landed if tail is not None]
        if any(tail.unfit for tail in tails):
            self._unfit.exchange()
        self._has_sparse = self._has_sparse or any(tail.sparse for tail in tails)
        if any(tail.mixed for tail in tails):
            self._several_calls.compare()
        first, least = landed[0][1], IS_THERE * self._workers.size
        if weights.total is None or is_exact or first is None:
            return 1.0, least
        if not first.weight:  # nobody's examples: zeros for all that has a gradient
            return 1.0, 0.0
        factor = self._reference() / first.weight
        self._workers.reference = first.weight
        return factor, least

    def _launch_rest(
        self, sequence: BucketOrder, shares: Mapping[int, float], weights: PassWeights
    ) -> None:
        num_launched, num_buckets = len(self._flights), len(sequence.buckets)
        for index in range(num_launched, num_buckets):
            bucket = sequence.buckets[index]
            columns = take(bucket.copies)
            self._unfit.scan(bucket.variables, columns, shares)
            is_last = index == num_buckets - 1
            more = is_last and num_launched > 0 and _are_left(sequence.buckets[:num_launched])
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
        """Sends the local replicas' weighted sum on its way."""
        # A worker that has left out a pass is behind by a run.
        phase = 0 if self._runner.running is None else self._workers.num_runs
        is_unfit, is_mixed = self._unfit.found is not None, self._several_calls.differ(weights)
        is_usual = not (self._workers.sums_replicas or more or is_unfit or is_mixed)
        if bucket.tails is not None and is_usual:
            scale = self._summands.usual_scale(columns, shares)
            if scale is not None:
                self._flights.launch_usual(
                    bucket,
                    bucket.tails,
                    columns,
                    scale=scale,
                    weight=weights.total or 0.0,
                    total=0.0 if weights.total is None else self._reference(),
                    phase=phase,
                )
                return
        has_sparse = _set_sparse_aside(bucket, columns)
        if self._kept_back:
            kept = [self._kept_back.is_sparse(v) for v in bucket.variables if v is not None]
            has_sparse = has_sparse or any(kept)
        summand = self._summands.contribution_of(bucket, columns, shares)
        buffers = self._flights.launch(
            bucket,
            *summand,
            weight=weights.total or 0.0,
            more=more,
            unfit=is_unfit,
            mixed=is_mixed,
            sparse=has_sparse,
            phase=phase,
        )
        if self._watch.streams is not None and self._workers.sums_replicas:
            self._watch.streams.keep(summand.columns, [[buffer] for buffer in buffers])

    def _accumulate(
        self, flight: BucketInFlight, tail: Trailer | None, factor: float, least: float
    ) -> None:
        """Gives every replica what has arrived of a bucket."""
        bucket, buffers = flight.bucket, list(flight.buffers)
        for r, buffer in enumerate(buffers):
            if buffer.dtype != bucket.dtype:
                buffers[r] = buffer.to(bucket.dtype)
            if factor != 1.0:
                buffers[r].mul_(factor)
        columns = [bucket.unpacked(buffer) for buffer in buffers]
        for device in self._replicas.devices[len(buffers) :]:
            columns.append(bucket.unpacked(buffers[0].to(device, copy=True)))
        targets: Sequence[list[Any]] = bucket.targets
        flags = bucket.all_count if tail is None else tail.flags
        variables = bucket.variables
        is_plain = not self.dropped and not [v for v in variables if v is None or v.hooks]
        if not is_plain or (tail is not None and flags and min(flags) <= least):
            which = [
                (i, variable)
                for i, (variable, flag) in enumerate(zip(variables, flags, strict=True))
                if variable is not None and flag > least
            ]
            columns = [[column[i] for i, _ in which] for column in columns]
            targets = [[mine[i] for i, _ in which] for mine in targets]
            run_hooks([variable for _, variable in which], columns)
            for r in range(len(columns) if self.dropped else 0):
                kept = [j for j, (_, v) in enumerate(which) if (v, r) not in self.dropped]
                columns[r] = [columns[r][j] for j in kept]
                targets[r] = [targets[r][j] for j in kept]
        for mine, reduced in zip(targets, columns, strict=True):
            accumulate(mine, reduced)

    def _take_rows(
        self, sequence: BucketOrder, shares: Mapping[int, float]
    ) -> list[Tensor | None]:
        """Takes this worker's summands of what is sparse."""
        rows = list[Tensor | None]()
        for variable in sequence.sparse:
            if variable is None:
                rows.append(None)
            else:
                columns = take([[copy] for copy in variable.copies])
                self._unfit.scan([variable], columns, shares)
                rows.append(self._summands.row(variable, columns, shares))
        return rows

    def _complete(self) -> list[tuple[BucketInFlight, Trailer | None]]:
        try:
            return self._flights.complete()
        finally:
            for unsettled in self._watch.unsettled:
                unsettled[:] = [one for one in unsettled if one is not self._flights]

    def _reference(self) -> float:
        return self._workers.reference or 1.0

    def estimated(self, weights: PassWeights) -> dict[int, float]:
        """Returns shares in the total that all know; what arrives is corrected."""
        reference, known = self._reference(), self._estimated
        if known[0] is not weights or known[1] != reference:
            known = self._estimated = weights, reference, weights.shares(reference)
        return known[2]

    def exact(self, weights: PassWeights) -> dict[int, float]:
        """Returns shares in the total of this very pass, which is exchanged."""
        if weights.total is None:
            return dict(weights)
        mine = struct.pack("<d", weights.total)
        said = self._workers.exchange("the weights of a pass", None, lambda: mine)
        return weights.shares(sum(struct.unpack("<d", one)[0] for one in said))


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
    """Whether gradients have come again of what has been launched."""
    return any(local_grad(copy) is not None for b in buckets for mine in b.copies for copy in mine)
