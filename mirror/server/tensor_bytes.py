"""Tensors as bytes: many in one buffer, each at a multiple of 16; no pickle."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mirror.server.variable_placement import ALIGNMENT

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Spec = tuple[Sequence[int], torch.dtype]

LARGE = 64 << 10
"""From how many bytes on a tensor travels as a buffer of its own, with no copy into another."""


def as_bytes(tensor: Tensor) -> Bytes:
    """Returns a tensor's bytes: its own memory, where that is contiguous and on the host."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    found: Bytes = plain.view(-1).view(torch.uint8).numpy()
    return found


def pack(tensors: Sequence[Tensor]) -> Bytes:
    """Returns the bytes of tensors in one new buffer."""
    ends = _ends((tuple(tensor.shape), tensor.dtype) for tensor in tensors)
    packed = np.empty(ends[-1] if ends else 0, np.uint8)
    begin = 0
    for tensor, end in zip(tensors, ends, strict=True):
        own = tensor.numel() * tensor.dtype.itemsize
        packed[begin : begin + own] = as_bytes(tensor)
        begin = end
    return packed


def unpack(packed: Any, specs: Sequence[Spec]) -> list[Tensor]:
    """Returns the tensors of a buffer, as views of it unless it is read-only."""
    flat = as_tensor(packed, torch.uint8)
    found, begin = [], 0
    for (shape, dtype), end in zip(specs, _ends(specs), strict=True):
        own = math.prod(shape) * dtype.itemsize
        found.append(flat[begin : begin + own].view(dtype).view(tuple(shape)))
        begin = end
    return found


def as_tensor(array: Any, dtype: torch.dtype) -> Tensor:
    """Returns an array's bytes as a flat tensor of a dtype: the same memory, if it is writable."""
    found = np.frombuffer(array, np.uint8) if not isinstance(array, np.ndarray) else array
    if not (found.flags.writeable and found.flags.c_contiguous):
        found = np.array(found)
    found = found.reshape(-1).view(np.uint8)
    if found.ctypes.data % ALIGNMENT:
        found = found.copy()
    return torch.from_numpy(found).view(dtype)


def packed_size(specs: Sequence[Spec]) -> int:
    """Returns the number of bytes of packed tensors."""
    ends = _ends(specs)
    return ends[-1] if ends else 0


def is_plain(tensor: Tensor) -> bool:
    """Whether ``as_bytes`` gives a tensor's own memory."""
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_conj()


def dtype_named(name: str) -> torch.dtype:
    """Returns the dtype that ``name_of`` has named."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch has no dtype {name!r}")
    return dtype


def name_of(dtype: torch.dtype) -> str:
    """Returns the name of a dtype: ``float32``."""
    return str(dtype).removeprefix("torch.")


def _ends(specs: Iterable[Spec]) -> list[int]:
    """Returns where each next tensor begins."""
    ends, end = [], 0
    for shape, dtype in specs:
        end += -(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        ends.append(end)
    return ends
