"""Reduction: the agreed sequence, summed over all workers, and what arrives given to replicas."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from mirror.execution.replicas import Replicas
from mirror.execution.runner import Runner
from mirror.replica.collectives.reducer import Reducer
from mirror.replica.copies.variable import Variable
from mirror.replica.gradients.agreed.bucket import Bucket
from mirror.replica.gradients.agreed.flights import Flight, Flights
from mirror.replica.gradients.agreed.rows import sum_rows
from mirror.replica.gradients.agreed.sequence import BucketSequence
from mirror.replica.gradients.agreed.several_calls import SeveralCalls
from mirror.replica.gradients.agreed.summands import Summands
from mirror.replica.gradients.agreed.tail import IS_THERE, Tail
from mirror.replica.gradients.agreed.unfit import Unfit
from mirror.replica.gradients.agreed.weights import KeptBack, Weights
from mirror.replica.gradients.arrivals import Column, accumulate, local_grad, take
from mirror.replica.gradients.hooks import run_hooks
from mirror.replica.gradients.unusual import reduce_unusual
from mirror.replica.gradients.watch import Watch


class Reduction:
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
        watch: Watch,
        kept_back: KeptBack,
        flights: Flights,
        unfit: Unfit,
    ) -> None:
        self._replicas, self._workers, self._runner = replicas, replicas.workers, runner
        self._watch, self._kept_back, self._flights, self._unfit = watch, kept_back, flights, unfit
        self._several_calls = SeveralCalls(self._workers, runner)
        self._summands = Summands(replicas, reducer, kept_back, watch.streams)
        self.dropped: set[tuple[Variable, int]] = set()

    def make(self, sequence: BucketSequence, weights: Weights) -> None:
        """Reduces a sequence until no worker has gradients left, of a second pass."""
        more = True
        while more:
            more = self._once(sequence, weights)
        self._several_calls.forget()

    def _once(self, sequence: BucketSequence, weights: Weights) -> bool:
        is_exact = bool(self._kept_back)
        shares: Mapping[int, float]
        shares = self.exact(weights) if is_exact else self.estimated(weights)
        try:
            rows = self._take_rows(sequence, shares)
            self._launch_rest(sequence, shares, weights)
        except BaseException:
            self._flights.abandon(sequence)
            raise
        if sequence.sparse:
            rows = sum_rows(self._workers, rows, sequence.sparse)
        self._watch.clear()  # last: what an interrupt has left in the slots is found again
        landed = self._land()
        if any(tail.unfit for _, tail in landed):
            self._unfit.meet()
        if any(tail.mixed for _, tail in landed):
            self._several_calls.compare()
        factor, least = 1.0, IS_THERE * self._workers.size
        if weights.total is not None and not is_exact:
            total = landed[0][1].weight
            if total:
                factor = self._reference() / total
                self._workers.reference = total
            else:  # nobody's examples: zeros for all that has a gradient
                least = 0.0
        self._runner.unfinished = True  # while some have it: see [Note: Interrupts]
        for flight, tail in landed:
            self._accumulate(flight, tail, factor, least)
        for variable, row in zip(sequence.sparse, rows, strict=True):
            if variable is not None and row is not None and (variable, 0) not in self.dropped:
                reduce_unusual(variable, [row], factor)
        self._runner.unfinished = self._runner.running is not None
        return bool(landed[-1][1].more)

    def _launch_rest(
        self, sequence: BucketSequence, shares: Mapping[int, float], weights: Weights
    ) -> None:
        num_launched, num_buckets = len(self._flights), len(sequence.buckets)
        for index in range(num_launched, num_buckets):
            bucket = sequence.buckets[index]
            columns = take(bucket.copies)
            self._unfit.look(bucket.variables, columns, shares)
            is_last = index == num_buckets - 1
            more = is_last and _are_left(sequence.buckets[:num_launched])
            self.launch(bucket, columns, shares, weights, more=more)

    def launch(
        self,
        bucket: Bucket,
        columns: list[Column],
        shares: Mapping[int, float],
        weights: Weights,
        *,
        more: bool = False,
    ) -> None:
        """Sends the local replicas' weighted sum on its way."""
        grads, flags, scale = self._summands.of(bucket, columns, shares)
        self._flights.launch(
            bucket,
            grads,
            flags,
            scale=scale,
            weight=weights.total or 0.0,
            more=more,
            unfit=self._unfit.found is not None,
            mixed=self._several_calls.are_unlike(weights),
            # A worker that has left out a pass is behind by a run.
            phase=0 if self._runner.running is None else self._workers.num_runs,
        )

    def _accumulate(self, flight: Flight, tail: Tail, factor: float, least: float) -> None:
        """Gives every replica what has arrived of a bucket."""
        bucket, buffer = flight.bucket, flight.buffer
        if buffer.dtype != bucket.dtype:
            buffer = buffer.to(bucket.dtype)
        if factor != 1.0:
            buffer.mul_(factor)
        others = [buffer.to(device, copy=True) for device in self._replicas.devices[1:]]
        columns = [bucket.unpacked(mine) for mine in (buffer, *others)]
        targets: Sequence[list[Any]] = bucket.targets
        variables = bucket.variables
        is_plain = not self.dropped and not [v for v in variables if v is None or v.hooks]
        if not is_plain or (tail.flags and min(tail.flags) <= least):
            which = [
                (i, variable)
                for i, (variable, flag) in enumerate(zip(variables, tail.flags, strict=True))
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
        self, sequence: BucketSequence, shares: Mapping[int, float]
    ) -> list[Tensor | None]:
        """Takes this worker's summands of what is sparse."""
        rows = list[Tensor | None]()
        for variable in sequence.sparse:
            if variable is None:
                rows.append(None)
            else:
                columns = take([[copy] for copy in variable.copies])
                self._unfit.look([variable], columns, shares)
                rows.append(self._summands.row(variable, columns, shares))
        return rows

    def _land(self) -> list[tuple[Flight, Tail]]:
        try:
            return self._flights.land()
        finally:
            for unsettled in self._watch.unsettled:
                unsettled[:] = [one for one in unsettled if one is not self._flights]

    def _reference(self) -> float:
        return self._workers.reference or 1.0

    def estimated(self, weights: Weights) -> dict[int, float]:
        """Returns shares in the total that all know; what arrives is corrected."""
        return weights.shares(self._reference())

    def exact(self, weights: Weights) -> dict[int, float]:
        """Returns shares in the total of this very pass, which is exchanged."""
        if weights.total is None:
            return dict(weights)
        mine = struct.pack("<d", weights.total)
        said = self._workers.exchange("the weights of a pass", None, lambda: mine)
        return weights.shares(sum(struct.unpack("<d", one)[0] for one in said))


def _are_left(buckets: Sequence[Bucket]) -> bool:
    """Whether gradients have come again of what has been launched."""
    return any(local_grad(copy) is not None for b in buckets for mine in b.copies for copy in mine)
