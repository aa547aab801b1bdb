"""InFlight: the buckets that travel between workers, and the number of this worker's reduction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from mirror.comm.workers.worker_group import LocalWorkerGroup
from mirror.errors import DivergenceError
from mirror.replica.multi_worker.bucket_order import BucketOrder
from mirror.replica.multi_worker.trailer import Trailer, UsualTrailers, read_trailer, write_trailer
from mirror.replica.multi_worker.worker_bucket import WorkerBucket
from mirror.replica.params.replicated_param import ReplicaParameter

# Differences between the marks of two reductions, and of two runs; those of buckets differ by 1.
_STRIDE, _PHASE = 7, 5


@dataclass(slots=True)
class BucketInFlight:
    """One bucket in flight.

    Attributes:
        buffers: the buffers that are summed over the workers in place: one, or one per replica.
        weight: this worker's weight, if the dtype of the buffer is too coarse for it.
        what: describes the reduction, for messages.
        usual: the trailer of the usual case, as numbers; ``None`` if it must be read.
    """

    bucket: WorkerBucket
    buffers: Sequence[Tensor]
    number: int
    waits: list[Callable[[], None]]
    weight: Tensor | None
    what: str
    usual: list[float] | None = None

    def is_done(self) -> Trailer | None:
        """Waits for the sum; returns its trailer, ``None`` for the usual one."""
        for wait in self.waits:
            wait()
        numbers = self.buffers[0][self.bucket.num_elements :].tolist()
        if numbers == self.usual:
            return None
        trailer = read_trailer(numbers)
        return trailer if self.weight is None else trailer._replace(weight=float(self.weight))


class InFlight:
    """The buckets that this worker has launched and not collected, in the agreed order."""

    def __init__(self, workers: LocalWorkerGroup) -> None:
        self._workers = workers
        self._launched: list[BucketInFlight] = []
        self._abandoned: list[BucketInFlight] = []
        self._num_reductions = 0

    def __len__(self) -> int:
        return len(self._launched)

    def launch(
        self,
        bucket: WorkerBucket,
        columns: Sequence[Sequence[Tensor]],
        flags: Sequence[float],
        scales: Sequence[float],
        *,
        weight: float = 0.0,
        more: bool = False,
        non_finite: bool = False,
        failed: bool = False,
        mixed: bool = False,
        sparse: bool = False,
        phase: int = 0,
    ) -> Sequence[Tensor]:
        """Launches the sum of the next bucket; returns this worker's packed contribution.

        Args:
            columns: per replica, if the workers sum replicas; otherwise only their sums.
            scales: the factor of each column.
            weight, more, non_finite, failed, mixed, sparse: for the trailer.
            phase: a number that must be the same on all workers; part of the mark.
        """
        number, reduction, what = self._next(phase)
        own_weight, waits = None, list[Callable[[], None]]()
        if not bucket.ends_exactly and not self._launched:
            own_weight = torch.tensor([weight], device="cpu")
            waits.append(self._workers.all_reduce(what, own_weight))
            weight = 0.0
        states = {"more": more, "non_finite": non_finite, "failed": failed}
        trailer = write_trailer(flags, number, weight, **states, mixed=mixed, sparse=sparse)
        # A worker has one trailer, in the first replica's buffer.
        trailers = [trailer, *([[0.0] * len(trailer)] * (len(columns) - 1))]
        buffers = [*map(bucket.packed, columns, scales, trailers, range(len(columns)))]
        if self._workers.sums_replicas:
            waits.append(self._workers.all_reduce_replicas(what, buffers))
        else:
            waits.append(self._workers.all_reduce(what, *buffers))
        self._launched.append(
            BucketInFlight(bucket, buffers, number, waits, own_weight, reduction)
        )
        return buffers

    def launch_usual(
        self,
        bucket: WorkerBucket,
        trailers: UsualTrailers,
        columns: Sequence[Sequence[Tensor]],
        *,
        scale: float,
        weight: float,
        total: float,
        phase: int,
    ) -> None:
        """Launches the next bucket, for replicas that have all of its gradients.

        Args:
            scale: the factor of all gradients.
            weight: this worker's weight.
            total: the sum of all workers' weights in the previous pass.
        """
        number, reduction, what = self._next(phase)
        buffer = bucket.summed(columns, scale, trailers.own(number, weight))
        wait = self._workers.all_reduce(what, buffer)
        usual = trailers.all(number, total, self._workers.size)
        flight = BucketInFlight(bucket, [buffer], number, [wait], None, reduction, usual)
        self._launched.append(flight)

    def _next(self, phase: int) -> tuple[int, str, str]:
        """Returns the next bucket's number, and descriptions of its reduction and of itself."""
        index = len(self._launched)
        number = self._num_reductions * _STRIDE + index + phase * _PHASE
        reduction = f"reduction {self._num_reductions + 1}"
        if phase:
            reduction += f", in run {phase + 1}"
        return number, reduction, f"gradients, bucket {index + 1} of {reduction}"

    def copies(self, num_replicas: int) -> list[list[ReplicaParameter]]:
        """Returns each replica's copies whose gradients are in flight."""
        buckets = [flight.bucket for flight in self._launched]
        return [[*chain(*(b.copies[r] for b in buckets))] for r in range(num_replicas)]

    def complete(self) -> list[tuple[BucketInFlight, Trailer | None]]:
        """Waits for all buckets of a reduction, and ends it.

        Raises:
            DivergenceError: a worker has summed a bucket of another reduction, or has failed.
        """
        trailers = [flight.is_done() for flight in self._launched]
        in_flight, self._launched = self._launched, []
        self._abandoned.clear()  # they were launched earlier, so they are complete now
        self._num_reductions += 1
        for flight, trailer in zip(in_flight, trailers, strict=True):
            if trailer is None:
                continue
            if trailer.failed:
                raise DivergenceError(
                    "all workers must reduce the same gradients, but a worker has failed after "
                    "its backward pass, while this one has gone on; its own error says why"
                )
            if not trailer.is_marked(flight.number, self._workers.size):
                # All workers see this, and exchange where they are; the exchange raises, as the
                # descriptions differ.
                self._workers.exchange(f"gradients: {flight.what}")
                raise DivergenceError(
                    "all workers must reduce the same gradients in the same order, but another "
                    f"worker is not at this worker's {flight.what}: it has made a backward pass, "
                    "or a step, more or less"
                )
        return list(zip(in_flight, trailers, strict=True))

    def abandon(self, order: BucketOrder) -> None:
        """Ends a reduction in which this worker has failed; its trailers inform the workers."""
        with suppress(Exception):  # other workers may have exited, and this one has an error
            for bucket in order.buckets[len(self._launched) :]:
                num_variables = len(bucket.variables)
                num_columns = len(bucket.devices) if self._workers.sums_replicas else 1
                zeros = [
                    [bucket.zeros(i, device) for i in range(num_variables)]
                    for device in bucket.devices[:num_columns]
                ]
                self.launch(bucket, zeros, [0.0] * num_variables, [1.0] * num_columns, failed=True)
        self._abandoned += self._launched  # kept: their memory is used until all have sent
        self._launched = []
        self._num_reductions += 1
