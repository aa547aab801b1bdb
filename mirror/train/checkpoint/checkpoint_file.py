r"""The file of a checkpoint: safetensors, with everything that is not a tensor in its metadata.

https://huggingface.co/docs/safetensors: 8 bytes of length, a JSON header, and the bytes of the
tensors one after the other::

    {"__metadata__":{"blake2b":"0f3c...","mirror":"{\"format\":2,\"tensors\":[...],...}"},
     "model.weight":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}}

The string ``mirror`` is the manifest, and ``blake2b`` its checksum. The manifest has the name,
dtype, shape and CRC-32 of every tensor, so the whole header follows from it. A reader builds the
header again and compares it: every byte of the file is either fixed or covered by a checksum.

A checksum finds damage; it is not a signature. So the manifest is checked like any input.

The safetensors library reads these files. It is not used here: it writes the header first, without
checksums or a sync, and reads by ``mmap``, where a file that becomes shorter kills the process.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
import os
import platform
import stat
import struct
import threading
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from mirror.base.tree_json import Malformed, shorten
from mirror.errors import CheckpointError

FORMAT = 2
MAX_HEADER_BYTES = 64 * 2**20
"""The longest header: the Python objects made from JSON take up to 30 times its size."""

_MAX_DIMENSIONS = 64
_MAX_ELEMENTS = 2**60
_CHUNK_BYTES = 4 * 2**20
_THREAD_BYTES = 2**20  # from here on a thread computes the checksums

_SYNC_FILE_RANGE_WRITE = 2
_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)  # Linux has it
if _sync_file_range is not None:
    _sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}
# The file's dtype for one of torch's, and how many elements of the file make one of torch's. Any
# other dtype is stored as bytes.
_FILE_DTYPES = {
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
class StoredTensor:
    """One tensor of the file.

    Attributes:
        crc32: the checksum of its bytes, as in zlib and PNG.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    crc32: int = 0

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.dtype.itemsize


@dataclass(frozen=True)
class TensorView:
    """A tensor in the memory of a stored one: ``stored.as_strided(shape, strides, offset)``."""

    base: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @property
    def end(self) -> int:
        """The index after its last element, in elements of the stored tensor."""
        return self.offset + span(self.shape, self.strides)

    def make_view(self, stored: Mapping[str, Tensor]) -> Tensor:
        """Returns the view; ``parse_manifest`` has checked that it lies within its base."""
        return stored[self.base].as_strided(self.shape, self.strides, self.offset)


def span(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Returns the number of elements from the first to the last of a tensor, both included."""
    if 0 in shape:
        return 0
    return 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))


@dataclass(frozen=True)
class ObjectState:
    """The state of one object.

    Attributes:
        kind: how it is restored, see ``stateful_objects.py``.
        type_name: the name of its class.
        state: its state as JSON, see ``tree_json.py``.
    """

    kind: str
    type_name: str
    state: Any


@dataclass(frozen=True)
class WorkerStates:
    """The states that one worker saves, as JSON.

    Attributes:
        objects: the states of objects, by the names that the user gave.
        random: the state of the global random generators.
        buffers: the per-replica copies of buffers, by the names of modules.
    """

    objects: dict[str, ObjectState]
    random: Any
    buffers: Any

    def to_json(self) -> dict[str, Any]:
        objects = {name: [s.kind, s.type_name, s.state] for name, s in self.objects.items()}
        return {"objects": objects, "random": self.random, "buffers": self.buffers}

    @classmethod
    def from_json(cls, body: Any) -> WorkerStates:
        objects = {}
        for name, (kind, type_name, state) in body["objects"].items():
            if not isinstance(kind, str) or not isinstance(type_name, str):
                raise Malformed(f"object {shorten(name)} has no kind")
            objects[name] = ObjectState(kind, type_name, state)
        return cls(objects, body["random"], body["buffers"])


@dataclass(frozen=True)
class Manifest:
    """Everything in a checkpoint but the bytes of tensors.

    Attributes:
        step: the number of steps done, if the caller of the save gave it.
        tensors: the stored tensors, in the order of the file.
        views: the other tensors.
        workers: the states of worker 0; of each other worker, what differs from worker 0's.
        written_by: the versions of torch and Python, and the time.
    """

    step: int | None
    tensors: Sequence[StoredTensor]
    views: dict[str, TensorView]
    workers: Sequence[WorkerStates]
    written_by: dict[str, Any] = field(default_factory=dict)

    def to_text(self) -> str:
        """Returns the manifest as JSON; its length does not depend on the checksums."""
        body = {
            "format": FORMAT,
            "step": self.step,
            "written_by": self.written_by,
            "tensors": [
                [t.name, str(t.dtype).removeprefix("torch."), list(t.shape), f"{t.crc32:08x}"]
                for t in self.tensors
            ],
            "views": {
                name: [v.base, list(v.shape), list(v.strides), v.offset]
                for name, v in self.views.items()
            },
            "workers": [states.to_json() for states in self.workers],
        }
        return json.dumps(body, separators=(",", ":"), allow_nan=False)

    @property
    def digest(self) -> bytes:
        """A hash of the whole checkpoint."""
        return hashlib.blake2b(self.to_text().encode(), digest_size=16).digest()


def parse_manifest(text: str) -> Manifest:
    """Returns the manifest that a string holds.

    Raises:
        Malformed: ``Manifest.to_text`` returns no such string.
    """
    try:
        body = json.loads(text)
        if body["format"] != FORMAT:
            raise Malformed(
                f"it has format {shorten(str(body['format']))}, and this version of mirror "
                f"reads format {FORMAT}"
            )
        if body["step"] is not None and not _is_count(body["step"]):
            raise Malformed("its step is not a number of steps")
        manifest = Manifest(
            body["step"],
            [_parse_tensor(*entry) for entry in body["tensors"]],
            {name: _parse_view(*entry) for name, entry in body["views"].items()},
            [WorkerStates.from_json(states) for states in body["workers"]],
            dict(body["written_by"]),
        )
        _check(manifest)
    except Malformed:
        raise
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise Malformed(
            f"mirror does not write this: {type(error).__name__}: {error!s:.200}"
        ) from error
    return manifest


def _check(manifest: Manifest) -> None:
    sizes = {tensor.name: tensor.num_elements for tensor in manifest.tensors}
    if len(sizes) != len(manifest.tensors) or sizes.keys() & manifest.views.keys():
        raise Malformed("two tensors have one name")
    for name, view in manifest.views.items():
        if view.end > sizes[view.base]:
            raise Malformed(f"view {shorten(name)} reaches beyond {shorten(view.base)}")
    first, *others = (states.objects.keys() for states in manifest.workers)
    if any(names - first for names in others):
        raise Malformed("a worker has other objects than worker 0")


def _parse_tensor(name: object, dtype: str, shape: object, crc32: str) -> StoredTensor:
    if not isinstance(name, str):
        raise Malformed("a tensor has no name")
    return StoredTensor(name, _DTYPES[dtype], _parse_sizes(shape), int(crc32, 16))


def _parse_view(base: str, shape: object, strides: object, offset: object) -> TensorView:
    if not _is_count(offset):
        raise Malformed("a view has no offset")
    return TensorView(base, _parse_sizes(shape), _parse_counts(strides), int(str(offset)))


def _parse_sizes(value: object) -> tuple[int, ...]:
    """Returns a shape that torch can count the elements of."""
    sizes = _parse_counts(value)
    if math.prod(n for n in sizes if n) >= _MAX_ELEMENTS:
        raise Malformed(f"the shape {shorten(str(value))} is too large")
    return sizes


def _parse_counts(value: object) -> tuple[int, ...]:
    if (
        not isinstance(value, list)
        or len(value) > _MAX_DIMENSIONS
        or not all(map(_is_count, value))
    ):
        raise Malformed(f"{shorten(str(value)[:200])} is not a shape or strides")
    return tuple(value)


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < _MAX_ELEMENTS


def describe_tensors(tensors: Mapping[str, Tensor]) -> list[StoredTensor]:
    """Returns the entries of tensors, without checksums."""
    return [StoredTensor(name, t.dtype, tuple(t.shape)) for name, t in tensors.items()]


def write_file(file: int, manifest: Manifest, tensors: Mapping[str, Tensor]) -> None:
    """Writes a checkpoint to a file descriptor, and waits until it is on the disk.

    Args:
        manifest: its ``tensors`` and ``written_by`` are filled in here.
        tensors: contiguous tensors on the host.
    """
    entries = describe_tensors(tensors)
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    manifest = replace(manifest, tensors=entries, written_by={**versions, "at": time.time()})
    # The header has the checksums, and a fixed length: it is written last.
    begin = len(_header(manifest))
    os.lseek(file, begin, os.SEEK_SET)
    buffers = [_bytes_of(tensor) for tensor in tensors.values()]
    sums: list[int] = []

    def compute() -> None:
        sums.extend(map(zlib.crc32, buffers))

    thread = None
    if sum(map(len, buffers)) < _THREAD_BYTES:
        compute()
    else:
        thread = threading.Thread(target=compute, name="mirror checksums")
        thread.start()
    try:
        for buffer in buffers:
            for start in range(0, len(buffer), _CHUNK_BYTES):
                chunk = buffer[start : start + _CHUNK_BYTES]
                _write_all(file, chunk)
                _begin_write_back(file, begin, len(chunk))
                begin += len(chunk)
    finally:
        if thread is not None:
            thread.join()
    summed = [replace(entry, crc32=crc32) for entry, crc32 in zip(entries, sums, strict=True)]
    os.lseek(file, 0, os.SEEK_SET)
    _write_all(file, memoryview(_header(replace(manifest, tensors=summed))))
    os.fsync(file)


def read_manifest(path: Path) -> Manifest:
    """Returns the manifest of a file; the bytes of the tensors are not read.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: it is damaged, or not a checkpoint.
    """
    with _open_regular(path) as file:
        return _read_manifest(file, path)


def read_file(path: Path) -> tuple[Manifest, dict[str, Tensor]]:
    """Returns the manifest and the tensors of a file; every byte of it is verified.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: it is damaged, or not a checkpoint; names the tensor.
    """
    with _open_regular(path) as file:
        manifest = _read_manifest(file, path)
        return manifest, {t.name: _read_tensor(file, path, t) for t in manifest.tensors}


def _open_regular(path: Path) -> BinaryIO:
    """Opens a file for reading, unless it is a link, or a pipe or device that could block."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error})") from error
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise CheckpointError(f"{path} must be a regular file, and is not")
    return open(file, "rb", buffering=0)


def _read_manifest(file: BinaryIO, path: Path) -> Manifest:
    num_bytes = os.fstat(file.fileno()).st_size
    try:
        content = _read_header(file, num_bytes)
        manifest = parse_manifest(json.loads(content[8:])["__metadata__"]["mirror"])
        if _header(manifest) != content:
            raise Malformed("its checksum differs")
    except (ValueError, TypeError, LookupError, RecursionError, CheckpointError) as error:
        raise CheckpointError(
            f"{path} is damaged, or not a checkpoint: {error!s:.300}; restore an older checkpoint"
        ) from error
    end = len(content)
    for entry in manifest.tensors:
        end += entry.num_bytes
        if end > num_bytes:
            raise CheckpointError(
                f"{path} is damaged: tensor {entry.name!r} is cut off; restore an older checkpoint"
            )
    if end < num_bytes:
        raise CheckpointError(
            f"{path} must have {end} bytes, and has {num_bytes}; it is damaged: restore an older "
            "checkpoint"
        )
    return manifest


def _read_header(file: BinaryIO, num_bytes: int) -> bytes:
    """Returns the length and the header."""
    length = file.read(8)
    end = 8 + int.from_bytes(length, "little")
    if len(length) < 8 or end > num_bytes:
        raise Malformed("its header is cut off")
    if end > MAX_HEADER_BYTES:
        raise Malformed(f"its header has more than {MAX_HEADER_BYTES} bytes")
    return length + file.read(end - 8)


def _read_tensor(file: Any, path: Path, entry: StoredTensor) -> Tensor:
    content = torch.empty(entry.num_bytes, dtype=torch.uint8, device="cpu")
    buffer = _bytes_of(content)
    filled = 0
    while filled < len(buffer):
        num_read = file.readinto(buffer[filled : filled + 2**30])
        if not num_read:
            break
        filled += num_read
    if filled < len(buffer) or zlib.crc32(buffer) != entry.crc32:
        raise CheckpointError(
            f"tensor {entry.name!r} in {path} is damaged: its checksum differs; restore an older "
            "checkpoint"
        )
    try:
        return content.view(entry.dtype).view(entry.shape)
    except (RuntimeError, NotImplementedError) as error:
        raise CheckpointError(
            f"tensor {entry.name!r} in {path} has dtype {entry.dtype}, which is not saved"
        ) from error


def _header(manifest: Manifest) -> bytes:
    """Returns the beginning of the file, padded so that tensors are aligned to 8 bytes.

    Raises:
        CheckpointError: it is too long.
    """
    text = manifest.to_text()
    digest = hashlib.blake2b(text.encode(), digest_size=32).hexdigest()
    described: dict[str, Any] = {"__metadata__": {"blake2b": digest, "mirror": text}}
    start = 0
    for entry in manifest.tensors:
        end = start + entry.num_bytes
        dtype, times = _FILE_DTYPES.get(entry.dtype, ("U8", entry.dtype.itemsize))
        shape = [*entry.shape] if times == 1 else [*entry.shape, times]
        described[entry.name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
        start = end
    header = json.dumps(described, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    if 8 + len(header) > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"everything that is not a tensor must fit into {MAX_HEADER_BYTES} bytes of JSON; "
            f"this state needs {len(header)}; keep long lists of numbers as tensors or arrays"
        )
    return struct.pack("<Q", len(header)) + header


def _bytes_of(tensor: Tensor) -> memoryview:
    flat = tensor.reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    content: Any = flat.view(torch.uint8).numpy()
    return memoryview(content)


def _begin_write_back(file: int, start: int, num_bytes: int) -> None:
    """Starts to write pages to the disk, so that fsync waits less; only where Linux does it."""
    if _sync_file_range is not None and num_bytes == _CHUNK_BYTES:
        _sync_file_range(file, start, num_bytes, _SYNC_FILE_RANGE_WRITE)


def _write_all(file: int, data: memoryview) -> None:
    while data:
        data = data[os.write(file, data) :]
