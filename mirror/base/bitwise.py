"""Compares tensors of any layout, and nested values, bit by bit, or by checksums of their bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

_PLAIN = (int, float, complex, str, bool)
_SUMMED_AT_ONCE = 2**24  # elements, of 8 temporary bytes each


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have equal bits; NaN equals NaN, 0.0 differs from -0.0.

    Sparse tensors are equal if they have the same entries with equal bits, in any order.
    """
    if a.shape != b.shape or a.dtype != b.dtype or a.layout != b.layout:
        return False
    if a.layout is not torch.strided:
        return all(map(same_bits, _parts(a), _parts(b)))
    if a.device != b.device:
        a, b = a.cpu(), b.cpu()
    a, b = (t.detach().resolve_conj().resolve_neg().contiguous() for t in (a, b))
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def bytes_of(tensor: Tensor) -> list[Any]:
    """Returns the bytes of a tensor of any layout: a uint8 array per strided part."""
    if tensor.layout is not torch.strided:
        return [raw for part in _parts(tensor) for raw in bytes_of(part)]
    host = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return [host.reshape(-1).view(torch.uint8).numpy()]


def sum_of_bits(tensor: Tensor) -> Tensor:
    """Returns a checksum of a dense tensor's bits: int64, 0-d, on its device.

    It is the sum over all elements of ``b + 2 * b ** 2`` modulo ``2 ** 64``, where ``b`` is the
    element's bits as an integer. This number is different for every ``b``, so a change of a single
    element changes the checksum. A sum of ``b`` itself would be weaker: rounding differences of +1
    and -1 in the last bit often cancel.
    """
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = tensor.view(kind[tensor.element_size()]).reshape(-1)
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for part in bits.split(_SUMMED_AT_ONCE):
        wide = part.to(torch.int64)
        total += torch.addcmul(wide, wide, wide, value=2).sum()
    return total


def have_equal_numbers(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors, on any devices, have equal shapes and numbers; NaN equals nothing."""
    if a.shape != b.shape:
        return False
    if a.layout is torch.strided and b.layout is torch.strided:
        return torch.equal(a.to(b.device), b)
    return same_bits(a, b)


def are_equal(a: Any, b: Any) -> bool:
    """Whether two values are equal: tensors and arrays by their bits, others by type and ``==``.

    NaN equals NaN. Objects that cannot be compared are different.
    """
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return same_bits(a, b)
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return (a.shape, a.dtype, a.tobytes()) == (b.shape, b.dtype, b.tobytes())
    try:
        return type(a) is type(b) and (a is b or bool(a == b) or bool(a != a and b != b))
    except (TypeError, ValueError, RuntimeError):
        return False


def same_values(a: Any, b: Any) -> bool:
    """Whether two nested values hold tensors with equal bits and equal numbers and strings.

    Other objects in them are not compared.
    """
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return same_bits(a, b)
    if type(a) is not type(b):
        return False
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(same_values(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same_values, a, b))
    return not isinstance(a, _PLAIN) or a == b or a != a


def _parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """Returns the strided tensors of which a sparse tensor consists."""
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.detach().coalesce()
        return tensor.indices(), tensor.values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor.detach().to_dense(),)
