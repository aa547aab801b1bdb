"""Wire: tensors and numbers as bytes, by hand, as nothing that arrives may be run."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from mirror.comm.workers.alone import Message, on_host

_LENGTH = struct.Struct("<I")


def serialize(tensors: Sequence[Tensor], numbers: Sequence[float]) -> bytes:
    """Returns tensors and numbers as a header in JSON and the tensors' bytes."""
    dense = on_host([tensor.to_dense() if tensor.is_sparse else tensor for tensor in tensors])
    described = [[str(t.dtype).removeprefix("torch."), list(t.shape)] for t in dense]
    exact = [float(number).hex() for number in numbers]  # NaN and infinity, too
    header = json.dumps([described, exact]).encode()
    raw = [t.reshape(-1).view(torch.uint8).numpy().tobytes() for t in dense if t.numel()]
    return b"".join([_LENGTH.pack(len(header)), header, *raw])


def deserialize(data: bytes) -> Message:
    """Returns what was packed."""
    (length,) = _LENGTH.unpack_from(data)
    described, numbers = json.loads(data[_LENGTH.size : _LENGTH.size + length])
    at = _LENGTH.size + length
    tensors = []
    for name, shape in described:
        dtype: torch.dtype = getattr(torch, name)
        tensor = torch.empty(shape, dtype=dtype)
        if tensor.numel():
            raw = bytearray(data[at : at + tensor.nbytes])
            tensor = torch.frombuffer(raw, dtype=dtype).reshape(shape)
            at += tensor.nbytes
        tensors.append(tensor)
    return Message(tensors, tuple(map(float.fromhex, numbers)))
