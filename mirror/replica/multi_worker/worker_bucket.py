"""WorkerBucket: variables with gradients that travel between workers in one buffer; its layout.

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
``grad_access.py``.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, chain
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mirror.comm.host_backends import BufferAddresses, host_library
from mirror.comm.packing import ALIGNMENT_BYTES, have_same_strides
from mirror.replica.params.replicated_param import ReplicaParameter, ReplicatedParam

FLAG_COUNTED, FLAG_ZERO_WEIGHT = 1.0, 2.0**-10
NUM_MARKS = 16
_MARKED = [[float(i == mark) for i in range(NUM_MARKS)] for mark in range(NUM_MARKS)]
_MAX_TRAILERS = 4096  # one per bucket, mark and size of the batch


class Signals(NamedTuple):
    """What a worker tells the others after the marks of a trailer; see the table above."""

    weight: float = 0.0
    more: float = 0.0
    non_finite: float = 0.0
    failed: float = 0.0
    mixed: float = 0.0
    sparse: float = 0.0


NUM_TRAILER_FIELDS = NUM_MARKS + len(Signals._fields)  # besides the flags


class Trailer(NamedTuple):
    """A trailer, summed over all workers."""

    flags: Sequence[float]
    marks: Sequence[float]
    signals: Signals

    def is_marked(self, number: int, size: int) -> bool:
        """Whether all workers have written the mark of this number."""
        return list(self.marks) == [size * mark for mark in _MARKED[number % NUM_MARKS]]


def write_trailer(flags: Sequence[float], number: int, signals: Signals) -> list[float]:
    """Returns a worker's trailer as numbers.

    Args:
        number: the number of the reduction and the bucket, which is marked modulo 16.
    """
    return [*flags, *_MARKED[number % NUM_MARKS], *signals]


def read_trailer(numbers: Sequence[float]) -> Trailer:
    """Returns the trailer that the numbers encode."""
    num_flags = len(numbers) - NUM_TRAILER_FIELDS
    end = num_flags + NUM_MARKS
    return Trailer(numbers[:num_flags], numbers[num_flags:end], Signals(*numbers[end:]))


@lru_cache(_MAX_TRAILERS)
def usual_trailer(
    num_flags: int, dtype: torch.dtype, mark: int, size: int, weight: float
) -> bytes:
    """Returns the trailer of the usual case, where all gradients are there, and no signal is set.

    Args:
        dtype: float32 or float64, in which the bytes are.
        mark: the number of the reduction and the bucket, modulo 16.
        size: the number of workers whose trailers are summed.
        weight: the sum of their weights.
    """
    trailer = write_trailer([FLAG_COUNTED] * num_flags, mark, Signals())
    numbers = [size * number for number in trailer]
    numbers[-len(Signals._fields)] = weight
    return array("f" if dtype == torch.float32 else "d", numbers).tobytes()


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
        can_sum_replicas: whether ``sum_replicas`` can be called.
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
        self.all_count = [FLAG_COUNTED] * len(variables)
        self.ends_exactly = self.wire in _EXACT
        self._are_complex = [target.is_complex() for target in targets]
        self.has_complex = any(self._are_complex)
        self._is_contiguous = all(target.is_contiguous() for target in targets)
        self._layouts = [_layout(target) for target in targets]
        sizes = [math.prod(shape) for shape, _ in self._layouts]
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
        is_plain = self._is_contiguous and self.wire == self.dtype and not self.has_complex
        self.can_sum_replicas = on_host and bool(variables) and is_plain and self.ends_exactly
        if self.can_sum_replicas:
            offsets = [*accumulate(self._steps, initial=0)]
            self._places = BufferAddresses(sizes, offsets, self.dtype)
            trailer_size = len(variables) + NUM_TRAILER_FIELDS
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

    def view_as_real(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """Returns a replica's gradients with complex ones viewed as real."""
        return [
            torch.view_as_real(grad.resolve_conj()) if grad.is_complex() else grad
            for grad in grads
        ]

    def sum_replicas(
        self, by_replica: Sequence[Sequence[Tensor]], scale: float, trailer: bytes
    ) -> Tensor:
        """Returns a new buffer with the sums over the replicas, and a trailer, in one pass.

        Only if ``can_sum_replicas``. Gradients that are not contiguous are copied.
        """
        if len(by_replica) == 1:
            rows = by_replica[0]
        else:
            rows = [*chain(*zip(*by_replica, strict=True))]
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
