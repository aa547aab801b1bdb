"""The buckets in which gradients travel between workers: their agreed order, and those in flight.

``BucketOrder`` has the order. ``InFlight`` has the buckets that travel, and the number of this
worker's reduction.

Workers must sum the same buckets in the same order: gloo ends the process when sizes differ. So
before the first pass that needs it, one exchange agrees on an order of all trained variables:
worker 0's order of arrival, then, in reverse order of registration, the variables that its pass
did not reach. The order is cut into buckets of one dtype each.

    A reduction always reduces all buckets in order. Absent gradients are sent as zeros; the
    trailers show which gradients are absent on every worker.
    A bucket is launched during the pass, by the hook of its last variable, once it is complete
    and all buckets before it are launched. Otherwise it is launched when a gradient is used.
    The last bucket is launched when a gradient is used: its trailer says whether gradients of
    another pass remain.

If a variable is missing in the order, the workers agree on a new one. They all detect that
themselves, since they run the same program. A frozen variable keeps its slot, and sends zeros, for
some reductions: a GAN freezes a network for half a step. A freed variable keeps its slot too,
because the time of the garbage collection differs between workers.

Variables with sparse gradients are in no bucket, see ``sum_sparse``. They stay sparse in all later
orders, since a dense gradient cannot be added to an optimizer's sparse state. If a sparse
gradient comes for a variable in a bucket (an embedding that the first passes did not reach), it is
set aside, the trailer says so, and the workers agree on an order without that variable.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from ctypes import string_at
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from mirror.comm.packing import plan_packs
from mirror.comm.workers.worker_group import LocalWorkerGroup
from mirror.errors import DivergenceError
from mirror.replica.collectives.reducer import Reducer
from mirror.replica.gradients.ready_grads import local_grad
from mirror.replica.multi_worker.worker_bucket import (
    Trailer,
    UsualTrailers,
    WorkerBucket,
    read_trailer,
    real_dtype,
    write_trailer,
)
from mirror.replica.params.replicated_param import ReplicaParameter, ReplicatedParam

_PATIENCE = 3  # reductions that a frozen variable is kept for


class BucketOrder:
    """The order on which all workers have agreed.

    Attributes:
        buckets: at least one; without variables it contains only a trailer.
        sparse: the variables with sparse gradients; ``None`` for a freed one.
        changes: the value of ``GradTracker.changes`` for which the order is known to fit.
    """

    def __init__(
        self,
        variables: Sequence[ReplicatedParam],
        sparse: Sequence[ReplicatedParam],
        changes: int,
        reducer: Reducer,
        devices: Sequence[torch.device],
    ) -> None:
        first = [variable.targets[0] for variable in variables]
        dtypes = list(map(real_dtype, first))
        packs = plan_packs([target.nbytes for target in first], dtypes, reducer.bytes_per_pack)
        members = [[variables[i] for i in pack] for pack in packs] or [[]]
        self.buckets = [
            WorkerBucket(each, reducer.wire_dtype, devices, on_host=reducer.is_on_host)
            for each in members
        ]
        self.sparse: list[ReplicatedParam | None] = list(sparse)
        self._known = {*variables, *sparse}
        self.changes = changes
        self._num_narrower = 0

    def forget(self, variable: ReplicatedParam) -> None:
        """Drops a variable that was freed. Takes no lock: a garbage collection may call it."""
        self._known.discard(variable)
        for bucket in self.buckets:
            bucket.forget(variable)
        if variable in self.sparse:
            self.sparse[self.sparse.index(variable)] = None

    def fits(self, trained: Sequence[ReplicatedParam], changes: int) -> bool:
        """Whether the order can be used for the variables that are trained after ``changes``."""
        if not self._known.issuperset(trained):
            return False
        if len(trained) == len(self._known):
            self.changes, self._num_narrower = changes, 0
            return True
        self._num_narrower += 1
        return self._num_narrower <= _PATIENCE


def agree(
    workers: LocalWorkerGroup,
    trained: Sequence[ReplicatedParam],
    arrived: Sequence[ReplicatedParam],
    weight: float,
    known_sparse: Collection[ReplicatedParam | None] = (),
) -> tuple[list[ReplicatedParam], list[ReplicatedParam]]:
    """Agrees with all workers on the order of the trained variables.

    Args:
        trained: all trained variables, in the order of registration.
        arrived: the variables with gradients, in the order of arrival.
        weight: this worker's weight; before the first pass the sum becomes the reference.
        known_sparse: the sparse variables of the previous order.

    Returns:
        The variables with dense gradients, in the agreed order, and those with sparse ones.
    """
    position = {variable: i for i, variable in enumerate(trained)}
    order = [position[variable] for variable in arrived if variable in position]
    order += sorted({*range(len(trained))} - {*order}, reverse=True)
    sparse = [i for v, i in position.items() if v in known_sparse or _is_sparse(v)]
    described = [
        (v.name, tuple(t.shape), str(t.dtype), t.stride())
        for v, t in ((v, v.targets[0]) for v in trained)
    ]
    digest = hashlib.blake2b(repr(described).encode(), digest_size=8).hexdigest()
    messages = workers.exchange(
        f"the order of the gradients of {len(trained)} parameters",
        digest,
        lambda: json.dumps([order, sparse, weight.hex()]).encode(),
    )
    every = [json.loads(message) for message in messages]
    if workers.reference is None:
        total = sum(float.fromhex(theirs) for _, _, theirs in every)
        workers.reference = total or float(workers.num_replicas)
    all_sparse = {i for _, theirs, _ in every for i in theirs}
    dense = [i for i in every[0][0] if i not in all_sparse]
    return [trained[i] for i in dense], [trained[i] for i in sorted(all_sparse)]


def _is_sparse(variable: ReplicatedParam) -> bool:
    grads = (local_grad(copy) for copy in variable.copies)
    return any(grad is not None and grad.is_sparse for grad in grads)


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
        return trailer if self.weight is None else trailer._replace(weight=float(self.weight))


class InFlight:
    """The buckets that this worker has launched and not collected.

    Attributes:
        launched: these buckets, in the agreed order; always the same list.
    """

    def __init__(self, workers: LocalWorkerGroup) -> None:
        self._workers = workers
        self.launched: list[BucketInFlight] = []
        self._abandoned: list[BucketInFlight] = []
        self._num_reductions = 0

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
        if not bucket.ends_exactly and not self.launched:
            own_weight = torch.tensor([weight], device="cpu")
            waits.append(self._workers.all_reduce(what, own_weight))
            weight = 0.0
        states = {"more": more, "non_finite": non_finite, "failed": failed}
        trailer = write_trailer(flags, number, weight, **states, mixed=mixed, sparse=sparse)
        # A worker has one trailer, in the first replica's buffer.
        trailers = [trailer, *([[0.0] * len(trailer)] * (len(columns) - 1))]
        buffers = [*map(bucket.pack, columns, scales, trailers, range(len(columns)))]
        if self._workers.sums_replicas:
            waits.append(self._workers.all_reduce_replicas(what, buffers))
        else:
            waits.append(self._workers.all_reduce(what, *buffers))
        self.launched.append(BucketInFlight(bucket, buffers, number, waits, own_weight, reduction))
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
        buffer = bucket.sum_replicas(columns, scale, trailers.own_trailer(number, weight))
        wait = self._workers.all_reduce(what, buffer)
        usual = trailers.all(number, total, self._workers.size)
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

    def copies(self, num_replicas: int) -> list[list[ReplicaParameter]]:
        """Returns the copies with gradients in flight, per replica."""
        buckets = [flight.bucket for flight in self.launched]
        return [[*chain(*(b.copies[r] for b in buckets))] for r in range(num_replicas)]

    def complete(self) -> list[tuple[BucketInFlight, Trailer | None]]:
        """Waits for all buckets of a reduction, and ends it.

        Raises:
            DivergenceError: a worker has summed a bucket of another reduction, or has failed.
        """
        trailers = [flight.is_done() for flight in self.launched]
        in_flight = self.launched.copy()
        self.launched.clear()
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
            for bucket in order.buckets[len(self.launched) :]:
                num_variables = len(bucket.variables)
                num_columns = len(bucket.devices) if self._workers.sums_replicas else 1
                zeros = [
                    [bucket.zeros(i, device) for i in range(num_variables)]
                    for device in bucket.devices[:num_columns]
                ]
                self.launch(bucket, zeros, [0.0] * num_variables, [1.0] * num_columns, failed=True)
        self._abandoned += self.launched  # kept: their memory is used until all have sent
        self.launched.clear()
        self._num_reductions += 1
