"""The file with the tensors of a checkpoint: safetensors, written beside its checksums.

https://huggingface.co/docs/safetensors: 8 bytes of length, a JSON header, and the tensors' bytes
one after the other. The checkpoint's own JSON says all that the header says, and a CRC-32 for each
tensor; so the header is never parsed here, but compared with the one that it must be.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import stat
import struct
import threading
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mirror.errors import CheckpointError

_CHUNK_BYTES = 4 * 2**20
_BESIDE_BYTES = 2**20  # from here on checksums are worth a thread

_SYNC_FILE_RANGE_WRITE = 2
_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)  # Linux has it
if _sync_file_range is not None:
    _sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)

# torch's dtype: that of the file, and how many of its elements make one of torch's. What is not
# here is stored as bytes.
_DTYPES = {
    torch.float64: ("F64", 1),
    torch.float32: ("F32", 1),
    torch.float16: ("F16", 1),
    torch.bfloat16: ("BF16", 1),
    torch.int64: ("I64", 1),
    torch.int32: ("I32", 1),
    torch.int16: ("I16", 1),
    torch.int8: ("I8", 1),
    torch.uint64: ("U64", 1),
    torch.uint32: ("U32", 1),
    torch.uint16: ("U16", 1),
    torch.uint8: ("U8", 1),
    torch.bool: ("BOOL", 1),
    torch.complex64: ("F32", 2),
    torch.complex128: ("F64", 2),
}


@dataclass(frozen=True)
class Stored:
    """One tensor of the file.

    Attributes:
        crc32: of its bytes, as in zlib and PNG.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    crc32: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_tensors(file: int, tensors: dict[str, Tensor]) -> list[Stored]:
    """Writes contiguous tensors of the host to a file descriptor; they are on the disk then.

    Returns:
        What was written, with checksums, which a thread has computed meanwhile.
    """
    buffers = [_bytes_of(tensor) for tensor in tensors.values()]
    if sum(map(len, buffers)) < _BESIDE_BYTES:
        sums = [zlib.crc32(buffer) for buffer in buffers]
        beside = None
    else:
        sums = []
        beside = threading.Thread(
            target=lambda: sums.extend(map(zlib.crc32, buffers)), name="mirror checksums"
        )
        beside.start()
    described = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
    try:
        header = memoryview(_header([Stored(*d, 0) for d in described]))
        written = 0
        for buffer in (header, *buffers):
            for start in range(0, len(buffer), _CHUNK_BYTES):
                chunk = buffer[start : start + _CHUNK_BYTES]
                _write_all(file, chunk)
                _begin_write_back(file, written, len(chunk))
                written += len(chunk)
        os.fsync(file)
    finally:
        if beside is not None:
            beside.join()
    return [Stored(*d, crc32) for d, crc32 in zip(described, sums, strict=True)]


def file_bytes(stored: Sequence[Stored]) -> int:
    """Returns how long the file with these tensors is."""
    return len(_header(stored)) + sum(s.num_bytes for s in stored)


def read_tensors(path: Path, stored: Sequence[Stored]) -> dict[str, Tensor]:
    """Returns the tensors of a file, on the host.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: it is another file than the one that was written; names the tensor.
    """
    file = open_regular(path)
    with open(file, "rb", buffering=0) as raw:
        actual, wanted = os.fstat(file).st_size, file_bytes(stored)
        if actual != wanted:
            where = "" if actual > wanted else f"; {_first_beyond(stored, actual)}"
            raise CheckpointError(
                f"{path} must have {wanted} bytes, as its checkpoint says; it has "
                f"{actual}{where}; it is damaged: restore an older checkpoint"
            )
        header = _header(stored)
        if raw.read(len(header)) != header:
            raise _damaged(path, "its header")
        return {entry.name: _read(raw, path, entry) for entry in stored}


def open_regular(path: Path) -> int:
    """Opens a file for reading: no link, nor a pipe or device, on which one could wait for ever.

    Raises:
        FileNotFoundError: there is none.
        CheckpointError: it is no regular file, or cannot be opened.
    """
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error})") from error
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise CheckpointError(f"{path} must be a regular file; it is none")
    return file


def _read(raw: Any, path: Path, entry: Stored) -> Tensor:
    content = torch.empty(entry.num_bytes, dtype=torch.uint8, device="cpu")
    buffer = _bytes_of(content)
    filled = 0
    while filled < len(buffer):
        num_read = raw.readinto(buffer[filled : filled + 2**30])
        if not num_read:
            raise _damaged(path, f"tensor {entry.name!r}")
        filled += num_read
    if zlib.crc32(buffer) != entry.crc32:
        raise _damaged(path, f"tensor {entry.name!r}")
    try:
        return content.view(entry.dtype).view(entry.shape)
    except (RuntimeError, NotImplementedError) as error:
        raise CheckpointError(
            f"tensor {entry.name!r} in {path} is of no kind that is saved: {entry.dtype}"
        ) from error


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"{what} in {path} is not what was written there: its checksum differs; restore an older "
        "checkpoint"
    )


def _first_beyond(stored: Sequence[Stored], num_bytes: int) -> str:
    end = len(_header(stored))
    if num_bytes < end:
        return "its header is cut off"
    for entry in stored:
        end += entry.num_bytes
        if end > num_bytes:
            break
    return f"tensor {entry.name!r} is cut off"


def _header(stored: Sequence[Stored]) -> bytes:
    """Returns the beginning of the file, padded so that tensors are aligned."""
    described: dict[str, Any] = {}
    start = 0
    for entry in stored:
        end = start + entry.num_bytes
        dtype, times = _DTYPES.get(entry.dtype, ("U8", entry.dtype.itemsize))
        shape = list(entry.shape) if times == 1 else [*entry.shape, times]
        described[entry.name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
        start = end
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _bytes_of(tensor: Tensor) -> memoryview:
    flat = tensor.reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    content: Any = flat.view(torch.uint8).numpy()
    return memoryview(content)


def _begin_write_back(file: int, start: int, num_bytes: int) -> None:
    """Has the disk begin before fsync waits for it, where that can be asked for."""
    if _sync_file_range is not None and num_bytes == _CHUNK_BYTES:
        _sync_file_range(file, start, num_bytes, _SYNC_FILE_RANGE_WRITE)


def _write_all(file: int, data: memoryview) -> None:
    while data:
        data = data[os.write(file, data) :]
