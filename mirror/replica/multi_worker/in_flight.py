"""InFlight: the buckets that travel between workers, and the number of this worker's reduction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from ctypes import string_at
from dataclasses import dataclass

import torch
from torch import Tensor

from mirror.comm.workers.worker_group import LocalWorkerGroup
from mirror.errors import DivergenceError
from mirror.replica.gradients.grad_tracker import GradTracker
from mirror.replica.multi_worker.bucket_order import BucketOrder
from mirror.replica.multi_worker.contributions import Contribution
from mirror.replica.multi_worker.worker_bucket import (
    NUM_MARKS,
    Signals,
    Trailer,
    WorkerBucket,
    read_trailer,
    usual_trailer,
    write_trailer,
)
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
        usual: the bytes of the usual case's trailer; ``None`` if it must be read.
        grads: the gradients in the buffer, if they were unpacked while it travels.
    """

    bucket: WorkerBucket
    buffers: Sequence[Tensor]
    number: int
    waits: list[Callable[[], None]]
    weight: Tensor | None
    what: str
    usual: bytes | None = None
    grads: list[Tensor] | None = None

    @property
    def copies(self) -> list[list[ReplicaParameter]]:
        """Per replica, the copies whose gradients are in the bucket."""
        return self.bucket.copies

    def is_done(self) -> Trailer | None:
        """Waits for the sum; returns its trailer, ``None`` for the usual one."""
        for wait in self.waits:
            wait()
        buffer, usual = self.buffers[0], self.usual
        # Two tensor operations would take 15 us here, where the caches are cold.
        if usual is not None and usual == string_at(
            buffer.data_ptr() + self.bucket.num_bytes, len(usual)
        ):
            return None
        trailer = read_trailer(buffer[self.bucket.num_elements :].tolist())
        if self.weight is None:
            return trailer
        signals = trailer.signals._replace(weight=float(self.weight))
        return trailer._replace(signals=signals)


class InFlight:
    """The buckets that this worker has launched and not collected.

    Attributes:
        launched: these buckets, in the agreed order: the list of ``GradTracker``.
    """

    def __init__(self, workers: LocalWorkerGroup, tracker: GradTracker) -> None:
        self._workers, self._tracker = workers, tracker
        self.launched: list[BucketInFlight] = tracker.in_flight
        self._abandoned: list[BucketInFlight] = []
        self._num_reductions = 0

    def launch(
        self, bucket: WorkerBucket, contribution: Contribution, signals: Signals, *, phase: int = 0
    ) -> Sequence[Tensor]:
        """Launches the sum of the next bucket; returns the buffers that are summed in place.

        Args:
            phase: a number that must be the same on all workers; part of the mark.
        """
        number, reduction, what = self._next(phase)
        own_weight, waits = None, list[Callable[[], None]]()
        if not bucket.ends_exactly and not self.launched:
            own_weight = torch.tensor([signals.weight], device="cpu")
            waits.append(self._workers.all_reduce(what, own_weight))
            signals = signals._replace(weight=0.0)
        by_replica, flags, scales = contribution
        trailer = write_trailer(flags, number, signals)
        # A worker has one trailer, in the first replica's buffer.
        trailers = [trailer, *([[0.0] * len(trailer)] * (len(scales) - 1))]
        buffers = [*map(bucket.pack, by_replica, scales, trailers, range(len(scales)))]
        if self._workers.sums_replicas:
            waits.append(self._workers.all_reduce_replicas(what, buffers))
        else:
            waits.append(self._workers.all_reduce(what, *buffers))
        self.launched.append(BucketInFlight(bucket, buffers, number, waits, own_weight, reduction))
        return buffers

    def launch_usual(
        self,
        bucket: WorkerBucket,
        by_replica: Sequence[Sequence[Tensor]],
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
        key = len(bucket.variables), bucket.dtype, number % NUM_MARKS
        buffer = bucket.sum_replicas(by_replica, scale, usual_trailer(*key, 1, weight))
        wait = self._workers.all_reduce(what, buffer)
        usual = usual_trailer(*key, self._workers.size, total)
        grads = bucket.unpack(buffer)  # now, as nothing else is done before the wait
        self.launched.append(
            BucketInFlight(bucket, [buffer], number, [wait], None, reduction, usual, grads)
        )

    def _next(self, phase: int) -> tuple[int, str, str]:
        """Returns the next bucket's number, and descriptions of its reduction and of itself."""
        index = len(self.launched)
        number = self._num_reductions * _STRIDE + index + phase * _PHASE
        reduction = f"reduction {self._num_reductions + 1}"
        if phase:
            reduction += f", in run {phase + 1}"
        return number, reduction, f"gradients, bucket {index + 1} of {reduction}"

    def complete(self) -> list[tuple[BucketInFlight, Trailer | None]]:
        """Waits for all buckets of a reduction, and ends it.

        Raises:
            DivergenceError: a worker has summed a bucket of another reduction, or has failed.
        """
        try:
            trailers = [flight.is_done() for flight in self.launched]
        finally:
            self._tracker.settle()
        in_flight = self.launched.copy()
        self.launched.clear()
        self._abandoned.clear()  # they were launched earlier, so they are complete now
        self._num_reductions += 1
        for flight, trailer in zip(in_flight, trailers, strict=True):
            if trailer is None:
                continue
            if trailer.signals.failed:
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
            for bucket in order.buckets[len(self.launched) :]:
                num_variables = len(bucket.variables)
                devices = bucket.devices if self._workers.sums_replicas else bucket.devices[:1]
                zeros = [[bucket.zeros(i, d) for i in range(num_variables)] for d in devices]
                absent = Contribution(zeros, [0.0] * num_variables, [1.0] * len(devices))
                self.launch(bucket, absent, Signals(failed=True))
        self._abandoned += self.launched  # kept: their memory is used until all have sent
        self.launched.clear()
        self._num_reductions += 1
