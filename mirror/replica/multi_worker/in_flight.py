"""Flights: buckets on their way between the workers, and how far this worker has come."""

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

# Between the marks of two reductions, as buckets have marks of their own; and of two runs.
_STRIDE, _PHASE = 7, 5


@dataclass(slots=True)
class BucketInFlight:
    """One bucket on its way.

    Attributes:
        buffers: what all workers' are summed in: one, or one of each replica.
        weight: this worker's, where the buffer is too coarse for it.
        what: which reduction it is of, in words.
        usual: what its tail is, if nobody has anything else to say; ``None``: it is read.
    """

    bucket: WorkerBucket
    buffers: Sequence[Tensor]
    number: int
    waits: list[Callable[[], None]]
    weight: Tensor | None
    what: str
    usual: list[float] | None = None

    def is_done(self) -> Trailer | None:
        """Waits until it is there; returns what its tail says, ``None`` for nothing unusual."""
        for wait in self.waits:
            wait()
        numbers = self.buffers[0][self.bucket.num_elements :].tolist()
        if numbers == self.usual:
            return None
        tail = read_trailer(numbers)
        return tail if self.weight is None else tail._replace(weight=float(self.weight))


class InFlight:
    """The buckets that this worker has launched and not collected, in the sequence's order."""

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
        unfit: bool = False,
        left: bool = False,
        mixed: bool = False,
        sparse: bool = False,
        phase: int = 0,
    ) -> Sequence[Tensor]:
        """Sends this worker's summand of the next bucket on its way; returns it, packed.

        Args:
            columns: of each replica, where the workers sum replicas; else their sums alone.
            scales: what the gradients of each are to be multiplied by.
            weight, more, unfit, left, mixed, sparse: for its tail.
            phase: what the marks of all workers must have in common besides.
        """
        number, of, what = self._next(phase)
        own_weight, waits = None, list[Callable[[], None]]()
        if not bucket.ends_exactly and not self._launched:
            own_weight = torch.tensor([weight], device="cpu")
            waits.append(self._workers.all_reduce(what, own_weight))
            weight = 0.0
        said = {"more": more, "unfit": unfit, "left": left, "mixed": mixed, "sparse": sparse}
        tail = write_trailer(flags, number, weight, **said)
        tails = [tail, *([[0.0] * len(tail)] * (len(columns) - 1))]  # a worker has one
        buffers = [*map(bucket.packed, columns, scales, tails, range(len(columns)))]
        if self._workers.sums_replicas:
            waits.append(self._workers.all_reduce_replicas(what, buffers))
        else:
            waits.append(self._workers.all_reduce(what, *buffers))
        self._launched.append(BucketInFlight(bucket, buffers, number, waits, own_weight, of))
        return buffers

    def launch_usual(
        self,
        bucket: WorkerBucket,
        tails: UsualTrailers,
        columns: Sequence[Sequence[Tensor]],
        *,
        scale: float,
        weight: float,
        total: float,
        phase: int,
    ) -> None:
        """Sends the next bucket on its way, of replicas that have all of it.

        Args:
            scale: what the gradients of each are to be multiplied by.
            weight: this worker's.
            total: what those of all workers are, if all is as before.
        """
        number, of, what = self._next(phase)
        buffer = bucket.summed(columns, scale, tails.own(number, weight))
        wait = self._workers.all_reduce(what, buffer)
        usual = tails.all(number, total, self._workers.size)
        self._launched.append(BucketInFlight(bucket, [buffer], number, [wait], None, of, usual))

    def _next(self, phase: int) -> tuple[int, str, str]:
        """Returns the number of the next bucket, and its reduction and itself in words."""
        index = len(self._launched)
        number = self._num_reductions * _STRIDE + index + phase * _PHASE
        of = f"reduction {self._num_reductions + 1}" + (f", in run {phase + 1}" if phase else "")
        return number, of, f"gradients, bucket {index + 1} of {of}"

    def copies(self, num_replicas: int) -> list[list[ReplicaParameter]]:
        """Returns each replica's copies whose gradients are on their way."""
        buckets = [flight.bucket for flight in self._launched]
        return [[*chain(*(b.copies[r] for b in buckets))] for r in range(num_replicas)]

    def complete(self) -> list[tuple[BucketInFlight, Trailer | None]]:
        """Waits for all buckets of a reduction, and ends it.

        Raises:
            DivergenceError: another worker has been at another reduction, or has failed.
        """
        tails = [flight.is_done() for flight in self._launched]
        flights, self._launched = self._launched, []
        self._abandoned.clear()  # these were before
        self._num_reductions += 1
        for flight, tail in zip(flights, tails, strict=True):
            if tail is None:
                continue
            if tail.left:
                raise DivergenceError(
                    "all workers must reduce the same gradients, but a worker has failed after "
                    "its backward pass, while this one has gone on; its own error says why"
                )
            if not tail.is_marked(flight.number, self._workers.size):
                # All have seen that, and say where they are: which is not the same.
                self._workers.exchange(f"gradients: {flight.what}")
                raise DivergenceError(
                    "all workers must reduce the same gradients in the same order, but a worker "
                    f"is at another one than this one's {flight.what}: it has made a backward "
                    "pass, or a step, more or less"
                )
        return list(zip(flights, tails, strict=True))

    def abandon(self, sequence: BucketOrder) -> None:
        """Ends a reduction that this worker has failed in: the others hear of it."""
        with suppress(Exception):  # they may be gone, and the worker has failed already
            for bucket in sequence.buckets[len(self._launched) :]:
                num_variables = len(bucket.variables)
                num_columns = len(bucket.devices) if self._workers.sums_replicas else 1
                zeros = [
                    [bucket.zeros(i, device) for i in range(num_variables)]
                    for device in bucket.devices[:num_columns]
                ]
                self.launch(bucket, zeros, [0.0] * num_variables, [1.0] * num_columns, left=True)
        self._abandoned += self._launched  # their memory is in use until the others have sent
        self._launched = []
        self._num_reductions += 1
