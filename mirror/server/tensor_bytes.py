"""Tensors as bytes: many in one buffer, each at an offset of a multiple of 16; no pickle."""

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
"""A tensor of this many bytes or more is sent as a buffer of its own, without a copy."""


def as_bytes(tensor: Tensor) -> Bytes:
    """Returns a tensor's bytes: its own memory if that is contiguous and on the host."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    array: Bytes = plain.view(-1).view(torch.uint8).numpy()
    return array


def pack(tensors: Sequence[Tensor]) -> Bytes:
    """Returns the bytes of tensors in one new buffer."""
    ends = _ends((tuple(tensor.shape), tensor.dtype) for tensor in tensors)
    packed = np.empty(ends[-1] if ends else 0, np.uint8)
    begin = 0
    for tensor, end in zip(tensors, ends, strict=True):
        size = tensor.numel() * tensor.dtype.itemsize
        packed[begin : begin + size] = as_bytes(tensor)
        begin = end
    return packed


def unpack(packed: Any, specs: Sequence[Spec]) -> list[Tensor]:
    """Returns the tensors of a buffer: views of it, or of a copy if it is read-only."""
    flat = as_tensor(packed, torch.uint8)
    tensors, begin = [], 0
    for (shape, dtype), end in zip(specs, _ends(specs), strict=True):
        size = math.prod(shape) * dtype.itemsize
        tensors.append(flat[begin : begin + size].view(dtype).view(tuple(shape)))
        begin = end
    return tensors


def as_tensor(array: Any, dtype: torch.dtype) -> Tensor:
    """Returns an array's bytes as a 1-d tensor: the same memory if it is writable and aligned."""
    data = np.frombuffer(array, np.uint8) if not isinstance(array, np.ndarray) else array
    if not (data.flags.writeable and data.flags.c_contiguous):
        data = np.array(data)
    data = data.reshape(-1).view(np.uint8)
    if data.ctypes.data % ALIGNMENT:
        data = data.copy()
    return torch.from_numpy(data).view(dtype)


def packed_size(specs: Sequence[Spec]) -> int:
    """Returns the size of the buffer of ``pack``, in bytes."""
    ends = _ends(specs)
    return ends[-1] if ends else 0


def is_plain(tensor: Tensor) -> bool:
    """Returns whether ``as_bytes`` returns a tensor's own memory."""
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_conj()


def dtype_named(name: str) -> torch.dtype:
    """Returns the dtype with a name as ``name_of`` returns it."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch has no dtype {name!r}")
    return dtype


def name_of(dtype: torch.dtype) -> str:
    """Returns the name of a dtype: ``float32``."""
    return str(dtype).removeprefix("torch.")


def _ends(specs: Iterable[Spec]) -> list[int]:
    """Returns the aligned end of each tensor, where the next one begins."""
    ends, end = [], 0
    for shape, dtype in specs:
        end += -(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        ends.append(end)
    return ends
