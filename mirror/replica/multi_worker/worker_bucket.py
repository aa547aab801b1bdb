"""WorkerBucket: variables with gradients that travel between workers in one buffer; its layout.

``Contributions`` is this worker's part of a reduction, summed over its replicas with their shares.
``Trailer`` has the numbers that travel after a bucket's gradients, and are summed with them. Each
worker writes its own; after the sum every worker reads the same trailer:

flags        one per variable. A worker writes 1 for a gradient that counts, 2^-10 for a gradient
             of weight 0, and 0 for none. If all write 0, ``grad`` is unchanged.
marks        16 numbers, all 0 but one, which depends on the reduction and the bucket: so a worker
             that sums a bucket of another reduction is detected
weight       the worker's weight; see [Note: Shares of workers]
more         1 from a worker that has gradients of a second pass: all workers reduce once more
non_finite   1 from a worker that has found a gradient that is not finite
failed       1 from a worker that has failed, and will not take part in the rest
mixed        1 from a worker that has made calls of different weights since the last reduction
sparse       1 from a worker that has set sparse gradients aside: all agree on an order without
             their variables

The layout of a bucket is the same on all workers: a gradient travels with the strides of its
variable, not with its own. It stays in the buffer, and ``p.grad`` is a view of it, see
``grad_access.py``. Sparse gradients are in no bucket; ``sum_sparse`` exchanges
their indices and values as tensors of any size.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, chain
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mirror.comm.host.host_backend import BufferAddresses, host_library
from mirror.comm.packing import ALIGNMENT_BYTES, have_same_strides
from mirror.comm.reduce_ops import reduce_tensors
from mirror.comm.workers.worker_group import LocalWorkerGroup, Message
from mirror.device.streams import ReplicaStreams
from mirror.errors import StrategyError
from mirror.execution.replicas import Replicas
from mirror.replica.collectives.reducer import Reducer
from mirror.replica.gradients.ready_grads import (
    ReplicaGrads,
    add_grads,
    are_usual,
    common_scale,
    unshare,
    weigh,
)
from mirror.replica.multi_worker.pass_weights import Deferred
from mirror.replica.params.replicated_param import ReplicaParameter, ReplicatedParam


class Contribution(NamedTuple):
    """This worker's part of a bucket.

    Attributes:
        columns: per replica, real gradients with zeros for absent ones; or only their sums.
        flags: one per variable, see ``worker_bucket.py``.
        scales: the factor by which each column is still to be multiplied.
    """

    columns: Sequence[Sequence[Tensor]]
    flags: Sequence[float]
    scales: Sequence[float]


class Contributions:
    """Computes this worker's contributions.

    Args:
        deferred: the deferred gradients; a contribution removes those that it contains.
        streams: on GPUs, the streams of the backward passes.
    """

    def __init__(
        self,
        replicas: Replicas,
        reducer: Reducer,
        deferred: Deferred,
        streams: ReplicaStreams | None,
    ) -> None:
        self._devices, self._workers = replicas.devices, replicas.workers
        self._reducer, self._deferred, self._streams = reducer, deferred, streams

    def contribution_of(
        self, bucket: WorkerBucket, columns: list[ReplicaGrads], shares: Mapping[int, float]
    ) -> Contribution:
        """Returns the contribution to a bucket.

        Args:
            columns: each replica's gradients, which are overwritten.
        """
        flags: Sequence[float] = bucket.all_count
        if self._deferred or not self._all_count(columns, shares):
            flags, shares = self._fill_absent(bucket, columns, shares)
        if bucket.has_complex:
            columns = [bucket.view_as_real(column) for column in columns]
        if self._workers.sums_replicas:
            return Contribution(columns, flags, [shares.get(r, 0.0) for r in range(len(columns))])
        if len(columns) == 1 or not flags:
            return Contribution(columns[:1], flags, [shares.get(0, 0.0)])
        moved = self._reducer.move(columns, self._streams)
        unshare(columns, moved.staying, self._streams)
        scale = common_scale(shares) if len(shares) == len(columns) else None
        if scale is None:
            scale = 1.0
            for r, column in enumerate(columns):
                share = shares.get(r, 0.0)
                if share not in (0.0, 1.0):  # with share 0 the column is zeros already
                    torch._foreach_mul_(column, share)
        self._reducer.all_reduce(moved, scale)
        return Contribution(columns[:1], flags, [1.0])

    def usual_scale(
        self, columns: Sequence[ReplicaGrads], shares: Mapping[int, float]
    ) -> float | None:
        """Returns the common share of all replicas.

        ``None`` if shares differ or are 0, or if a gradient is absent or not dense.
        """
        if self._deferred.has_passes or len(shares) < len(columns):
            return None
        if len(columns) == 1:
            scale = shares.get(0)
            return scale if scale and are_usual(columns[0]) else None
        scale = common_scale(shares)
        return scale if scale and all(map(are_usual, columns)) else None

    @staticmethod
    def _all_count(columns: Sequence[ReplicaGrads], shares: Mapping[int, float]) -> bool:
        if len(shares) < len(columns) or not all(shares.values()):
            return False
        return all(map(are_usual, columns))

    def _fill_absent(
        self, bucket: WorkerBucket, columns: Sequence[ReplicaGrads], shares: Mapping[int, float]
    ) -> tuple[list[float], Mapping[int, float]]:
        """Replaces gradients that are absent or have no share by zeros; returns flags, shares."""
        flags = [0.0] * len(bucket.variables)
        for r, column in enumerate(columns):
            counts = COUNTS if shares.get(r, 0.0) else IS_THERE
            for i, grad in enumerate(column):
                if grad is not None:
                    flags[i] = max(flags[i], counts)
        refuse_graphs(columns)
        if self._deferred:  # deferred gradients are weighted already
            weigh(list(columns), shares)
            shares = dict.fromkeys(range(len(columns)), 1.0)
            for i, variable in enumerate(bucket.variables):
                kept = None if variable is None else self._deferred.pop_dense(variable)
                for column, summand in zip(columns, kept or (), strict=False):
                    column[i] = add_grads(column[i], summand)
                    flags[i] = COUNTS
        for r, (column, device) in enumerate(zip(columns, self._devices, strict=True)):
            for i, grad in enumerate(column):
                if grad is None or not shares.get(r, 0.0):  # replaced, since 0 * NaN is NaN
                    column[i] = bucket.zeros(i, device)
        return flags, shares

    def sparse_contribution(
        self, variable: ReplicatedParam, columns: list[ReplicaGrads], shares: Mapping[int, float]
    ) -> Tensor | None:
        """Returns the contribution to one variable, sparse if all replicas' gradients are."""
        refuse_graphs(columns)
        weigh(columns, shares)
        kept = self._deferred.pop(variable, None) or [None] * len(columns)
        own = (column[0] for column in columns)
        grads = [add_grads(grad, summand) for grad, summand in zip(own, kept, strict=True)]
        present = [grad for grad in grads if grad is not None]
        if not all(grad.is_sparse for grad in present):
            present = [grad.to_dense() if grad.is_sparse else grad for grad in present]
        return reduce_tensors(present, self._devices[0]) if present else None


def refuse_graphs(columns: Sequence[ReplicaGrads]) -> None:
    """Raises StrategyError for gradients that carry a graph."""
    if any(grad is not None and grad.requires_grad for column in columns for grad in column):
        raise StrategyError(
            "gradients of several workers carry no graph, but backward was called with "
            "create_graph=True; call backward() without it: only gradients of the model's inputs "
            "may have a graph, by torch.autograd.grad(..., create_graph=True)"
        )


COUNTS, IS_THERE = 1.0, 2.0**-10
_MARKS = 16
_MARKED = [[float(i == mark) for i in range(_MARKS)] for mark in range(_MARKS)]
_NUM_AFTER_MARKS = 6
NUM_OTHERS = _MARKS + _NUM_AFTER_MARKS
_MAX_CACHED = 4 * _MARKS  # more than one per mark, as batches may have several sizes


class Trailer(NamedTuple):
    """A trailer, summed over all workers."""

    flags: Sequence[float]
    marks: Sequence[float]
    weight: float
    more: float
    non_finite: float
    failed: float
    mixed: float
    sparse: float

    def is_marked(self, number: int, size: int) -> bool:
        """Whether all workers have written the mark of this number."""
        return list(self.marks) == [size * mark for mark in _MARKED[number % _MARKS]]


class UsualTrailers:
    """The trailers of the usual case: every worker has all gradients, and no flag is set.

    They are cached per mark, and compared as a whole.

    Args:
        dtype: float32 or float64.
    """

    def __init__(self, num_flags: int, dtype: torch.dtype) -> None:
        self._flags = [COUNTS] * num_flags
        self._code = "f" if dtype == torch.float32 else "d"
        self._own: dict[tuple[int, float], bytes] = {}
        self._all: dict[tuple[int, float, int], bytes] = {}

    def own_trailer(self, number: int, weight: float) -> bytes:
        """Returns this worker's trailer, as bytes of the dtype."""
        key = number % _MARKS, weight
        known = self._own.get(key)
        if known is None:
            if len(self._own) >= _MAX_CACHED:
                self._own.clear()
            known = array(self._code, write_trailer(self._flags, number, weight)).tobytes()
            self._own[key] = known
        return known

    def all(self, number: int, total: float, size: int) -> bytes:
        """Returns the sum of all workers' trailers, as bytes of the dtype.

        Args:
            total: the sum of their weights.
            size: the number of workers.
        """
        key = number % _MARKS, total, size
        known = self._all.get(key)
        if known is None:
            if len(self._all) >= _MAX_CACHED:
                self._all.clear()
            numbers = [size * one for one in write_trailer(self._flags, number, 0.0)]
            numbers[-_NUM_AFTER_MARKS] = total
            known = self._all[key] = array(self._code, numbers).tobytes()
        return known


def write_trailer(
    flags: Sequence[float],
    number: int,
    weight: float,
    *,
    more: bool = False,
    non_finite: bool = False,
    failed: bool = False,
    mixed: bool = False,
    sparse: bool = False,
) -> list[float]:
    """Returns a worker's trailer as numbers.

    Args:
        number: the number of the reduction and the bucket, which is marked modulo 16.
    """
    return [*flags, *_MARKED[number % _MARKS], weight, more, non_finite, failed, mixed, sparse]


def read_trailer(numbers: Sequence[float]) -> Trailer:
    """Returns the trailer that the numbers encode."""
    num_flags = len(numbers) - NUM_OTHERS
    end = num_flags + _MARKS
    return Trailer(numbers[:num_flags], numbers[num_flags:end], *numbers[end:])


# For ``map``, which costs less than a Python loop.
_is_contiguous, _data_ptr, _as_strided_ = Tensor.is_contiguous, Tensor.data_ptr, Tensor.as_strided_
_EXACT = (torch.float32, torch.float64)  # precise enough for the weight in a trailer


class WorkerBucket:
    """One bucket of the agreed order.

    Args:
        wire_dtype: the dtype that travels; ``None`` for the gradients' own.
        devices: the replicas' devices.
        on_host: whether the gradients are in host memory, so that the host library may sum them.

    Attributes:
        variables: in order; ``None`` for a freed one.
        copies, targets: per replica, those of each variable.
        wire: the dtype that travels.
        all_count: the flags of a worker that has all gradients.
        ends_exactly: whether the wire dtype is precise enough for the weight in the trailer.
        num_elements, num_bytes: the size of the buffer without the trailer.
        usual_trailers: the trailers of the usual case; ``None`` excludes ``sum_replicas``.
    """

    def __init__(
        self,
        variables: Sequence[ReplicatedParam],
        wire_dtype: torch.dtype | None,
        devices: Sequence[torch.device],
        *,
        on_host: bool = False,
    ) -> None:
        self.variables: list[ReplicatedParam | None] = list(variables)
        targets = [variable.targets[0] for variable in variables]
        replicas, device = range(len(devices)), devices[0]
        self.copies: list[list[ReplicaParameter]] = [
            [v.copies[r] for v in variables] for r in replicas
        ]
        self.targets: list[list[nn.Parameter]] = [
            [v.targets[r] for v in variables] for r in replicas
        ]
        self.devices = tuple(devices)
        self.dtype = real_dtype(targets[0]) if targets else torch.float32
        self.wire = self.dtype if wire_dtype is None else wire_dtype
        self.all_count = [COUNTS] * len(variables)
        self.ends_exactly = self.wire in _EXACT
        self._are_complex = [target.is_complex() for target in targets]
        self.has_complex = any(self._are_complex)
        self._is_contiguous = all(target.is_contiguous() for target in targets)
        self._layouts = [_layout(target) for target in targets]
        sizes = [_number(shape) for shape, _ in self._layouts]
        item = self.dtype.itemsize
        gaps = [-size * item % ALIGNMENT_BYTES // item for size in sizes]
        self._gaps: dict[torch.device, list[Tensor]] = {}
        if any(gaps):
            for device in dict.fromkeys(devices):
                zeros = torch.zeros(ALIGNMENT_BYTES, dtype=self.dtype, device=device)
                self._gaps[device] = [zeros[:gap] for gap in gaps]
        self._steps = [size + gap for size, gap in zip(sizes, gaps, strict=True)]
        self.num_elements = sum(self._steps)
        self.num_bytes = self.num_elements * item
        self._shaped = [
            i for i, (shape, _) in enumerate(self._layouts) if gaps[i] or len(shape) != 1
        ]
        self._shapes = [self._layouts[i][0] for i in self._shaped]
        self._strides = [self._layouts[i][1] for i in self._shaped]
        packs = on_host and bool(variables) and self._is_contiguous and self.ends_exactly
        self.usual_trailers: UsualTrailers | None = None
        if packs and self.wire == self.dtype and not self.has_complex:
            self.usual_trailers = UsualTrailers(len(variables), self.wire)
            offsets = [*accumulate(self._steps, initial=0)]
            self._places = BufferAddresses(sizes, offsets, self.dtype)
            trailer_size = len(variables) + NUM_OTHERS
            self._size = self.num_elements + trailer_size

    def forget(self, variable: ReplicatedParam) -> None:
        """Drops a variable that was freed; its slot stays, as other workers may still have it."""
        if variable not in self.variables:
            return
        i = self.variables.index(variable)
        self.variables[i] = None
        for mine, targets in zip(self.copies, self.targets, strict=True):
            mine[i] = targets[i] = nn.Parameter(torch.empty(0))  # type: ignore[call-overload]

    def zeros(self, i: int, device: torch.device) -> Tensor:
        """Returns a zero gradient for variable ``i``."""
        shape, strides = self._layouts[i]
        return torch.empty_strided(shape, strides, dtype=self.dtype, device=device).zero_()

    def view_as_real(self, column: Sequence[Tensor]) -> list[Tensor]:
        """Returns a replica's gradients with complex ones viewed as real."""
        return [
            torch.view_as_real(grad.resolve_conj()) if grad.is_complex() else grad
            for grad in column
        ]

    def sum_replicas(
        self, columns: Sequence[Sequence[Tensor]], scale: float, trailer: bytes
    ) -> Tensor:
        """Returns a new buffer with the sums over the replicas, and a trailer, in one pass.

        Only for a bucket with ``usual_trailers``. Gradients that are not contiguous are copied.
        """
        if len(columns) == 1:
            rows = columns[0]
        else:
            rows = [grad for row in zip(*columns, strict=True) for grad in row]
        if not all(map(_is_contiguous, rows)):
            rows = [grad.contiguous() for grad in rows]
        buffer = torch.empty(self._size, dtype=self.dtype, device="cpu")
        addresses = list(map(_data_ptr, rows))
        host_library().pack_sums(addresses, self._places, scale, trailer, buffer.data_ptr())
        return buffer

    def pack(
        self, grads: Sequence[Tensor], scale: float, trailer: Sequence[float], replica_id: int = 0
    ) -> Tensor:
        """Returns a new buffer with real gradients, multiplied by ``scale``, and a trailer."""
        device = self.devices[replica_id]
        if self._is_contiguous and False not in [grad.is_contiguous() for grad in grads]:
            pieces = [grad.view(-1) for grad in grads]
        else:
            pieces = list(self._order_elements(grads))
        if self._gaps:
            pieces = [*chain(*zip(pieces, self._gaps[device], strict=True))]
        pieces.append(torch.tensor(trailer, dtype=self.dtype, device=device))
        if self.wire == self.dtype:
            buffer = torch.cat(pieces)
        else:
            size = self.num_elements + len(trailer)
            buffer = torch.empty(size, dtype=self.wire, device=device)
            torch.cat(pieces, out=buffer)
        if scale != 1.0:
            buffer.narrow(0, 0, self.num_elements).mul_(scale)
        return buffer

    def _order_elements(self, grads: Sequence[Tensor]) -> Iterator[Tensor]:
        for grad, (shape, strides) in zip(grads, self._layouts, strict=True):
            ordered = grad
            if grad.stride() != strides:
                ordered = torch.empty_strided(shape, strides, dtype=grad.dtype, device=grad.device)
                ordered.copy_(grad)
            yield ordered.as_strided((ordered.numel(),), (1,))

    def unpack(self, buffer: Tensor) -> list[Tensor]:
        """Returns the gradients in a buffer; to autograd they are no views of it."""
        rest = buffer.numel() - self.num_elements
        *grads, _ = torch.unsafe_split_with_sizes(buffer, [*self._steps, rest])
        for _ in map(_as_strided_, [grads[i] for i in self._shaped], self._shapes, self._strides):
            continue
        if not self.has_complex:
            return grads
        return [
            torch.view_as_complex(grad) if is_complex else grad
            for grad, is_complex in zip(grads, self._are_complex, strict=True)
        ]


def real_dtype(target: Tensor) -> torch.dtype:
    """Returns the dtype of a gradient, or of the real and imaginary parts of a complex one."""
    return torch.view_as_real(target.detach()).dtype if target.is_complex() else target.dtype


def _layout(target: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the shape and strides of a variable's gradient in the buffer."""
    shape: tuple[int, ...] = tuple(target.shape)
    if target.is_complex():
        shape = (*shape, 2)
    elif have_same_strides([target]):
        return shape, target.stride()
    return shape, torch.empty(shape, device="meta").stride()


def _number(shape: Sequence[int]) -> int:
    number = 1
    for size in shape:
        number *= size
    return number


_ABSENT, _SPARSE, _DENSE = 0.0, 1.0, 2.0


def sum_sparse(
    workers: LocalWorkerGroup,
    mine: Sequence[Tensor | None],
    variables: Sequence[ReplicatedParam | None],
) -> list[Tensor | None]:
    """Sums gradients over the workers, each sparse, dense or absent; sparse if all are.

    Args:
        mine: this worker's gradients; None for an absent one.
        variables: their variables; ``None`` for a freed one.
    """
    like = [None if variable is None else variable.targets[0] for variable in variables]
    kinds, tensors = [], list[Tensor]()
    for grad in mine:
        if grad is None:
            kinds.append(_ABSENT)
        elif grad.is_sparse:
            kinds.append(_SPARSE)
            grad = grad.coalesce()
            tensors += [grad.indices(), grad.values()]
        else:
            kinds.append(_DENSE)
            tensors.append(grad)
    every = workers.exchange_tensors("sparse gradients", len(mine), tensors, kinds)
    columns = [list(_decode(message, like)) for message in every]
    totals: list[Tensor | None] = []
    for parts, target in zip(zip(*columns, strict=True), like, strict=True):
        present = [part for part in parts if part is not None]
        if not present or target is None:
            totals.append(None)
            continue
        if not all(part.is_sparse for part in present):
            present = [part.to_dense() if part.is_sparse else part for part in present]
        totals.append(reduce_tensors(present, target.device))
    return totals


def _decode(message: Message, like: Sequence[Tensor | None]) -> Iterator[Tensor | None]:
    """Yields the gradients of one worker."""
    tensors = iter(message.tensors)
    for kind, target in zip(message.numbers, like, strict=True):
        if kind == _ABSENT:
            yield None
        elif kind == _DENSE:
            yield next(tensors)
        else:
            rows = next(tensors), next(tensors)
            yield (
                None
                if target is None
                else torch.sparse_coo_tensor(*rows, target.shape, check_invariants=False)
            )
