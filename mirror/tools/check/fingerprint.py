"""Fingerprints: what is kept of a tensor, so that two runs can be compared.

A small tensor is kept as it is. Of a larger one a count sketch is kept (Charikar, Chen and
Farach-Colton, 2002): its numbers, with fixed random signs, are summed in 1,024 buckets. The norm
of the difference of two sketches estimates the norm of the difference of the tensors, to a few
percent, and changes of order or of place show as well.

``join_parts`` joins what the replicas have of one quantity, in every way that may make the whole
of it.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

_BUCKETS = 1024
_MOST_VALUES = 4096  # a tensor with at most so many is kept as it is
_ROWS = 2048  # of the table of signs
_SMALLEST = 1e-30


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What is kept of one tensor.

    Attributes:
        shape: of the tensor.
        dtype: its name, without ``torch.``.
        values: its numbers, or its sketch, as float64.
        num_bad: how many numbers are NaN or infinite; they count as 0 in ``values``.
        bits: a checksum of an integer or bool tensor, else 0.
    """

    shape: tuple[int, ...]
    dtype: str
    values: Any
    num_bad: int = 0
    bits: int = 0

    @property
    def norm(self) -> float:
        """The Euclidean norm, or its estimate."""
        return float(np.linalg.norm(self.values))

    @property
    def is_float(self) -> bool:
        """Whether numbers may differ by rounding."""
        return "float" in self.dtype or "complex" in self.dtype

    def distance(self, other: Fingerprint) -> float:
        """Returns the norm of the difference; infinity for other shapes or other bad numbers."""
        if self.shape != other.shape or self.num_bad != other.num_bad:
            return float("inf")
        return float(np.linalg.norm(self.values - other.values))

    def has_same_rows(self, other: Fingerprint) -> bool:
        """Whether the first dimension has the same examples in another order."""
        if self.shape != other.shape or not self.shape or self._num != self.values.size:
            return False
        some, others = (f.values.reshape(f.shape[0], -1) for f in (self, other))
        return bool(np.array_equal(_sort_rows(some), _sort_rows(others)))

    @property
    def _num(self) -> int:
        return int(np.prod(self.shape))


def _sort_rows(rows: Any) -> Any:
    return rows[np.lexsort(rows.T[::-1])]


def dense(tensor: Tensor) -> Tensor:
    """Returns the dense form of a tensor, without its graph: few operations take other layouts."""
    tensor = tensor.detach()
    if tensor.is_nested:
        padded: Tensor = torch.nested.to_padded_tensor(tensor, 0)
        return padded
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


@torch.no_grad()
def fingerprint(tensor: Tensor) -> Fingerprint:
    """Returns the fingerprint of a tensor; of a sparse or nested one that of its dense form."""
    tensor = dense(tensor)
    shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
    bits = 0
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if not tensor.is_floating_point():
        plain = tensor.reshape(-1).contiguous().cpu()
        bits = zlib.crc32(plain.view(torch.uint8).numpy().tobytes()) if plain.numel() else 0
    wide = torch.float64 if tensor.numel() <= _MOST_VALUES else torch.float32
    flat = tensor.to(wide).reshape(-1)
    if flat.numel() > _MOST_VALUES:
        bad = 0 if bool(torch.isfinite(flat.sum())) else int((~torch.isfinite(flat)).sum())
        values = _sketch(torch.nan_to_num(flat, 0.0, 0.0, 0.0) if bad else flat)
        return Fingerprint(shape, dtype, values, bad, bits)
    values = flat.cpu().numpy().copy()  # it may be the tensor's own memory
    finite = np.isfinite(values)
    if finite.all():
        return Fingerprint(shape, dtype, values, 0, bits)
    return Fingerprint(shape, dtype, np.where(finite, values, 0.0), int((~finite).sum()), bits)


def _sketch(flat: Tensor) -> Any:
    """Returns the sums of a tensor's numbers, with random signs, in buckets."""
    signs = _signs(flat.device)
    total = torch.zeros(_BUCKETS, device=flat.device, dtype=torch.float64)
    for some in flat.split(_ROWS * _BUCKETS):
        whole = some.numel() // _BUCKETS * _BUCKETS
        table = some[:whole].view(-1, _BUCKETS)
        total += (table * signs[: len(table)]).sum(0)  # no product of matrices: autocast
        total[: some.numel() - whole] += some[whole:]
    return total.cpu().numpy()


@cache
def _signs(device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(8191)
    drawn = torch.randint(0, 2, (_ROWS, _BUCKETS), generator=generator)
    return (drawn * 2.0 - 1.0).to(device, torch.float32)


def relative_distance(distance: float, norm: float) -> float:
    """Returns a distance relative to a norm."""
    return distance / max(norm, _SMALLEST)


_MOST_DIMS = 5  # the examples' dimension is one of the first so many


def join_parts(
    parts: Sequence[Tensor], counts: Sequence[float]
) -> tuple[list[Fingerprint], list[str]]:
    """Returns the fingerprints of the candidates, and how each was joined.

    ::

        cat D          along a dimension that has the replicas' numbers of examples, or a multiple
        interleaved    along the first one, of which the examples are the faster half
        same           all replicas have the same numbers
        mean, sum      over the replicas, the mean weighted by examples
        max, min       of integers, and of bools: any, all

    Args:
        counts: the replicas' numbers of examples.
    """
    if len(parts) == 1:
        return [fingerprint(parts[0])], ["cat 0"]
    found: list[tuple[Tensor, str]] = []
    parts = list(map(dense, parts))
    if len({part.dtype for part in parts}) > 1 or len({part.dim() for part in parts}) > 1:
        return [], []
    for dim in range(min(parts[0].dim(), _MOST_DIMS)):
        multiple = _multiple([part.shape[dim] for part in parts], counts)
        others = {(*part.shape[:dim], *part.shape[dim + 1 :]) for part in parts}
        if multiple and len(others) == 1:
            found.append((torch.cat(parts, dim), f"cat {dim}"))
            if multiple > 1 and dim == 0:
                rows = [p.reshape(multiple, -1, *p.shape[1:]) for p in parts]
                found.append((torch.cat(rows, 1).flatten(0, 1), "interleaved"))
    if len({part.shape for part in parts}) == 1:
        first = parts[0]
        if all(torch.equal(part, first) for part in parts[1:]):
            found.append((first, "same"))
        elif first.is_floating_point():
            wide = [part.double() for part in parts]
            total = sum(counts)
            mean = sum(w * (c / total) for w, c in zip(wide, counts, strict=True))
            found.append((torch.as_tensor(mean).to(first.dtype), "mean"))
            found.append((torch.stack(wide).sum(0).to(first.dtype), "sum"))
        elif not first.is_complex():
            stacked = torch.stack(list(parts))
            found += [(stacked.amax(0), "max"), (stacked.amin(0), "min")]
            if first.dtype != torch.bool:
                found.append((stacked.sum(0), "sum"))
    return [fingerprint(tensor) for tensor, _ in found], [way for _, way in found]


def _multiple(sizes: Sequence[int], counts: Sequence[float]) -> int:
    """Returns how many times the examples a dimension is; 0 if it is not."""
    if not counts or counts[0] <= 0 or sizes[0] % counts[0]:
        return 0
    multiple = int(sizes[0] // counts[0])
    fits = all(size == multiple * count for size, count in zip(sizes, counts, strict=True))
    return multiple if fits else 0
