"""Compares the joined outputs of a split call with those of one device, entry by entry."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mirror.base.containers import IMMUTABLE, contents_of, is_leaf, is_shared
from mirror.errors import short_repr
from mirror.values import PerReplica, is_number

# Units in the last place that need no explanation, also in `mirror check`.
TIGHT = 80.0
_MOST_ENTRIES = 10_000


@dataclass(frozen=True)
class OutputDifference:
    """One output that differs from one device's.

    Attributes:
        path: the output, as an expression: ``output['loss']``.
        what: how it differs, in words.
        kind: "number" (a 0-d value), "rows" (values of a tensor) or "structure".
        distance: how far values differ, relative to the largest; infinite for other differences.
    """

    path: str
    what: str
    kind: str
    distance: float = math.inf


def find_output_differences(
    joined: Any, whole: Any, *, values: bool = True, tolerance: float | None = None
) -> Iterator[OutputDifference]:
    """Yields the outputs of a split call that differ from those of one device.

    A PerReplica is not a difference: it says that the replicas' values have no joined value.

    Args:
        joined: what the caller of the split call gets.
        whole: what the module returns for the whole batch.
        values: whether numbers are compared, or structure, shapes and dtypes only.
        tolerance: the largest relative distance of values that counts as rounding; by default
            80 units in the last place of their dtype.
    """
    return _Comparison(values, tolerance).compare("output", joined, whole)


class _Comparison:
    def __init__(self, values: bool, tolerance: float | None) -> None:
        self._values, self._tolerance = values, tolerance
        self._seen: set[int] = set()

    def compare(self, path: str, joined: Any, whole: Any) -> Iterator[OutputDifference]:
        if joined is whole or isinstance(joined, PerReplica) or id(whole) in self._seen:
            return
        if isinstance(joined, Tensor) and isinstance(whole, Tensor):
            yield from self._compare_tensors(path, joined, whole)
        elif isinstance(joined, np.ndarray) and isinstance(whole, np.ndarray):
            yield from self._compare_arrays(path, joined, whole)
        elif is_number(joined) and is_number(whole) and type(joined) is type(whole):
            yield from self._compare_numbers(path, joined, whole)
        elif type(joined) is not type(whole):
            what = f"is {_described(joined)}, and on one device {_described(whole)}"
            yield OutputDifference(path, what, "structure")
        elif type(whole) in IMMUTABLE:
            if self._values and joined != whole:
                what = f"is {short_repr(joined)}, and on one device {short_repr(whole)}"
                yield OutputDifference(path, what, "structure")
        elif not is_leaf(whole) and not is_shared(whole) and len(self._seen) < _MOST_ENTRIES:
            self._seen.add(id(whole))
            yield from self._compare_contents(path, joined, whole)

    def _compare_contents(self, path: str, joined: Any, whole: Any) -> Iterator[OutputDifference]:
        entries, expected = contents_of(joined), contents_of(whole)
        if isinstance(whole, (set, frozenset)):
            if self._values and entries.keys() != expected.keys():
                yield OutputDifference(path, "has other elements than on one device", "structure")
            return
        if len(entries) != len(expected):
            what = f"has {len(entries)} entries, and on one device {len(expected)}"
            yield OutputDifference(path, what, "structure")
        elif entries.keys() != expected.keys():
            what = f"has the keys {[*entries]}, and on one device {[*expected]}"
            yield OutputDifference(path, what, "structure")
        else:
            is_indexed = isinstance(whole, (list, tuple, dict)) or hasattr(whole, "keys")
            for key, value in expected.items():
                inner = f"{path}[{key!r}]" if is_indexed else f"{path}.{key}"
                yield from self.compare(inner, entries[key], value)

    def _compare_tensors(
        self, path: str, joined: Tensor, whole: Tensor
    ) -> Iterator[OutputDifference]:
        if _repeats(joined, whole):
            return
        if joined.shape != whole.shape or joined.layout != whole.layout:
            what = f"has the shape {_shape(joined)}, and on one device {_shape(whole)}"
            yield OutputDifference(path, what, "structure")
        elif joined.dtype != whole.dtype:
            what = f"is of {joined.dtype}, and on one device of {whole.dtype}"
            yield OutputDifference(path, what, "structure")
        elif self._values and whole.numel() and not whole.is_meta and not whole.is_quantized:
            distance = _distance(joined.detach(), whole.detach())
            if distance > self._limit(whole):
                kind = "rows" if whole.dim() else "number"
                if whole.numel() == 1:
                    what = f"is {joined.item():.6g}, and on one device {whole.item():.6g}"
                else:
                    what = f"differs from one device's by {distance:.2g} of its largest value"
                yield OutputDifference(path, what, kind, distance)

    def _compare_arrays(self, path: str, joined: Any, whole: Any) -> Iterator[OutputDifference]:
        if joined.shape != whole.shape or joined.dtype != whole.dtype:
            what = (
                f"has the shape {joined.shape} and dtype {joined.dtype}, and on one device "
                f"{whole.shape} and {whole.dtype}"
            )
            yield OutputDifference(path, what, "structure")
        elif whole.dtype.kind in "biufc":
            tensors = torch.as_tensor(joined), torch.as_tensor(whole)
            yield from self._compare_tensors(path, *tensors)
        elif self._values and not bool(np.all(joined == whole)):
            yield OutputDifference(path, "has other entries than on one device", "structure")

    def _compare_numbers(self, path: str, joined: Any, whole: Any) -> Iterator[OutputDifference]:
        if not self._values or joined == whole or (joined != joined and whole != whole):
            return
        distance = math.inf
        if isinstance(whole, (float, complex)):
            distance = abs(joined - whole) / max(abs(joined), abs(whole))
            # A number that is read from a tensor has the errors of that one's dtype.
            if distance <= self._limit_of(torch.float32):
                return
        yield OutputDifference(
            path, f"is {joined!r}, and on one device {whole!r}", "number", distance
        )

    def _limit(self, tensor: Tensor) -> float:
        if not tensor.is_floating_point() and not tensor.is_complex():
            return 0.0 if self._tolerance is None else self._tolerance
        return self._limit_of(tensor.dtype)

    def _limit_of(self, dtype: torch.dtype) -> float:
        if self._tolerance is not None:
            return self._tolerance
        return TIGHT * torch.finfo(dtype).eps


def _repeats(joined: Tensor, whole: Tensor) -> bool:
    """Returns whether the joined tensor has one device's only row for each example.

    Such as the positions of a cache: on replicas with one example it looks like their rows.
    """
    if whole.shape[:1] != (1,) or joined.shape[1:] != whole.shape[1:] or len(joined) < 2:
        return False
    return bool((joined.detach() == whole.detach().to(joined.device)).all())


def _distance(joined: Tensor, whole: Tensor) -> float:
    """Returns the largest distance of elements, relative to the largest finite element.

    Infinite if one has nan or inf where the other has not.
    """
    if joined.layout is not torch.strided:
        joined, whole = joined.to_dense(), whole.to_dense()
    whole = whole.to(joined.device)
    if not (whole.is_floating_point() or whole.is_complex()):
        return float((joined != whole).double().mean())
    wide = torch.complex128 if whole.is_complex() else torch.float64
    a, b = joined.to(wide), whole.to(wide)
    if wide is torch.complex128:
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    finite = a.isfinite() & b.isfinite()
    if not bool((finite | (a == b) | (a.isnan() & b.isnan())).all()):
        return math.inf
    a, b = a.where(finite, 0.0), b.where(finite, 0.0)
    largest = float(b.abs().max())
    farthest = float((a - b).abs().max())
    return farthest / largest if largest else math.inf if farthest else 0.0


def _shape(tensor: Tensor) -> str:
    return str(tuple(tensor.shape))


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {_shape(value)}"
    return short_repr(value) if type(value) in IMMUTABLE else f"a {type(value).__name__}"
