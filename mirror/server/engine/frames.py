"""Frames, the messages of a connection: a head, JSON and raw buffers; nothing is pickled.

::

    "mir1"  kind  bytes of signature  bytes of header  number     head: 21 bytes, little-endian
    ["pull", ["<f4", [3, 4]], ...]                                the signature: JSON
    {"version": 3}                                                the header: JSON; empty for {}
    the bytes of the buffers, one after another

Large buffers are sent from their own memory and received into their final place; only small ones
are copied. Signatures recur, so their encodings are cached.
"""

from __future__ import annotations

import functools
import json
import math
import os
import struct
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

import numpy as np

from mirror.errors import short_repr
from mirror.server.engine.channels import Channel, TlsSocket
from mirror.server.engine.engine_types import Array, Header, Sendable, WireError

CALL, ANSWER, RAISED = range(3)

MAX_HEADER = 64 << 20
"""Bytes of JSON in one frame."""
MAX_SIGNATURE = 4 << 20
"""Bytes of JSON for the method, and the dtypes and shapes of the buffers."""
MAX_BYTES = min(64 << 30, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
"""Bytes of all buffers of one frame: at most the memory of this machine."""

_MAGIC = b"mir1"
_HEAD = struct.Struct("<4sBIIQ")
_STAGING = 1 << 16
_MAX_IOVECS = 256  # buffers of one system call; Linux allows 1024
_DTYPES = {np.dtype(code).str: np.dtype(code) for code in "?bBhHiIlLqQefdgFDG"}
_DTYPES |= {dtype.newbyteorder().str: dtype.newbyteorder() for dtype in _DTYPES.values()}
_encode = json.JSONEncoder(separators=(",", ":")).encode
_decode = json.JSONDecoder().decode

Spec = tuple[np.dtype[Any], tuple[int, ...]]
"""The dtype and shape of a buffer."""
Allocator = Callable[[int, Sequence[Spec]], "list[Array] | None"]
"""Returns the arrays that receive the buffers of a frame, by its number; None means new arrays."""


class Frame(NamedTuple):
    """A received frame; ``method`` is empty in answers."""

    kind: int
    number: int
    method: str
    header: Header
    buffers: list[Array]


class FrameWriter:
    """A frame to be sent, in as many steps as the channel needs."""

    __slots__ = ("_next", "_pieces")

    def __init__(
        self, kind: int, number: int, method: str, header: Header, buffers: Sequence[Sendable]
    ) -> None:
        arrays = [as_array(buffer) for buffer in buffers]
        signature = _signature(method, tuple([(array.dtype, array.shape) for array in arrays]))
        try:
            text = _encode(header).encode() if header else b""
        except (TypeError, ValueError) as error:
            raise WireError(f"a header is JSON: {error}; send data as buffers") from None
        if len(text) > MAX_HEADER:
            raise WireError(
                f"a header has at most {MAX_HEADER} bytes of JSON, this one has {len(text)}; send "
                "data as buffers"
            )
        head = _HEAD.pack(_MAGIC, kind, len(signature), len(text), number)
        self._pieces = [memoryview(head + signature + text)]
        for array in arrays:
            if array.nbytes:
                self._pieces.append(array.reshape(-1).view(np.uint8).data)
        self._next = 0

    def send(self, sock: Channel) -> bool:
        """Sends what the channel takes; returns whether the frame is complete."""
        while self._next < len(self._pieces):
            try:
                sent = sock.sendmsg(self._pieces[self._next : self._next + _MAX_IOVECS])
            except BlockingIOError:
                return False
            while sent:
                piece = self._pieces[self._next]
                if sent < piece.nbytes:
                    self._pieces[self._next] = piece[sent:]
                    break
                sent -= piece.nbytes
                self._next += 1
        return True

    def copy_rest(self) -> int:
        """Copies the unsent part, so that the buffers may change; returns its size in bytes."""
        rest = b"".join(self._pieces[self._next :])
        self._pieces, self._next = [memoryview(rest)], 0
        return len(rest)


def as_array(buffer: Sendable) -> Array:
    """Returns a buffer as an array; copies it only if it is not contiguous.

    Raises:
        WireError: the buffer does not hold plain numbers.
    """
    array = buffer if isinstance(buffer, np.ndarray) else _bytes_array(buffer)
    if array.dtype.str not in _DTYPES:
        raise WireError(
            f"a buffer holds plain numbers; got {short_repr(buffer)}; for a bfloat16 tensor send "
            "tensor.view(torch.uint16).numpy()"
        )
    return np.ascontiguousarray(array) if array.ndim else array


def _bytes_array(buffer: object) -> Array:
    try:
        return np.frombuffer(buffer, np.uint8)  # type: ignore[call-overload, no-any-return]
    except (TypeError, ValueError):
        raise WireError(
            f"a buffer is a numpy array or bytes; got {short_repr(buffer)}; for a tensor send "
            "tensor.numpy()"
        ) from None


class FrameReader:
    """Reads frames from a channel.

    Args:
        allocator: returns the arrays for a frame's buffers; without it, all arrays are new.
    """

    def __init__(self, sock: Channel, allocator: Allocator | None = None) -> None:
        self._sock, self._allocator = sock, allocator
        self._tls = sock if isinstance(sock, TlsSocket) else None
        self._staging = memoryview(bytearray(_STAGING))
        self._start = self._end = 0
        self._partial: Generator[Frame | None, None, None] | None = None
        self._is_reading = False

    @property
    def has_more(self) -> bool:
        """Whether bytes have arrived that belong to no frame yet, and that no poll reports."""
        return self._start < self._end or (self._tls is not None and self._tls.pending() > 0)

    def receive(self) -> Frame | None:
        """Returns the next frame, or None if it has not arrived completely.

        Raises:
            EOFError: the connection was closed or lost.
            WireError: the bytes are not a frame, or an earlier call was interrupted in a frame.
        """
        if self._is_reading:
            raise WireError("reading a frame was interrupted")
        self._is_reading = True
        try:
            frame = self._next()
        except ConnectionError as error:
            raise EOFError(str(error)) from None
        self._is_reading = False
        return frame

    def _next(self) -> Frame | None:
        if self._partial is None:
            if self._start >= self._end and not self._stage():
                return None
            frame = self._read_staged()
            if frame is not None:
                return frame
            self._partial = self._read()
        frame = next(self._partial)
        if frame is not None:
            self._partial = None
        return frame

    def _stage(self) -> bool:
        """Receives into the empty staging buffer; returns whether any bytes have arrived."""
        try:
            count = self._sock.recv_into(self._staging)
        except BlockingIOError:
            return False
        if not count:
            raise EOFError("the other side has closed the connection")
        self._start, self._end = 0, count
        return True

    def _read_staged(self) -> Frame | None:
        """Returns the next frame if all of it is in the staging buffer, as small frames are."""
        start = self._start
        position = start + _HEAD.size
        if position > self._end:
            return None
        kind, length, text_length, number = _head(self._staging[start:position])
        start, position = position, position + length + text_length
        if position > self._end:
            return None
        signature = bytes(self._staging[start : start + length])
        method, specs, num_bytes = _read_signature(signature)
        if position + num_bytes > self._end:
            return None
        header = _header(bytes(self._staging[start + length : position])) if text_length else {}
        buffers = self._allocate(number, specs)
        for buffer in buffers:
            if buffer.nbytes:
                view = buffer.reshape(-1).view(np.uint8).data
                view[:] = self._staging[position : position + view.nbytes]
                position += view.nbytes
        self._start = position
        return Frame(kind, number, method, header, buffers)

    def _read(self) -> Generator[Frame | None, None, None]:
        """Yields None while bytes are missing, then the frame; large buffers are not staged."""
        head = bytearray(_HEAD.size)
        yield from self._fill(memoryview(head))
        kind, length, text_length, number = _head(head)
        text = bytearray(length + text_length)
        yield from self._fill(memoryview(text))
        # The cache must not keep large texts.
        read = _read_signature if length <= _STAGING else _read_signature.__wrapped__
        method, specs, _ = read(bytes(text[:length]))
        header = _header(bytes(text[length:])) if text_length else {}
        buffers = self._allocate(number, specs)
        for buffer in buffers:
            if buffer.nbytes:
                yield from self._fill(buffer.reshape(-1).view(np.uint8).data)
        yield Frame(kind, number, method, header, buffers)

    def _allocate(self, number: int, specs: Sequence[Spec]) -> list[Array]:
        buffers = self._allocator(number, specs) if self._allocator else None
        return [np.empty(shape, dtype) for dtype, shape in specs] if buffers is None else buffers

    def _fill(self, view: memoryview) -> Generator[None, None, None]:
        while view.nbytes:
            if self._start < self._end:
                count = min(view.nbytes, self._end - self._start)
                view[:count] = self._staging[self._start : self._start + count]
                self._start += count
                view = view[count:]
                continue
            if view.nbytes < _STAGING:
                if not self._stage():
                    yield None
                continue
            try:
                count = self._sock.recv_into(view)
            except BlockingIOError:
                yield None
                continue
            if not count:
                raise EOFError("the other side has closed the connection")
            view = view[count:]


def _head(head: bytearray | memoryview) -> tuple[int, int, int, int]:
    magic, kind, length, text_length, number = _HEAD.unpack(head)
    is_large = length > MAX_SIGNATURE or text_length > MAX_HEADER
    if magic != _MAGIC or kind > RAISED or is_large:
        raise WireError(f"protocol error: a frame begins with {_MAGIC!r}; got {bytes(head)!r}")
    return kind, length, text_length, number


def _header(text: bytes) -> Header:
    try:
        header = _decode(text.decode())
        if isinstance(header, dict):
            return header
    except (ValueError, RecursionError):
        pass
    raise WireError(f"protocol error: a frame's header is a dict in JSON, not {text[:60]!r}")


@functools.lru_cache
def _signature(method: str, arrays: tuple[Spec, ...]) -> bytes:
    text = _encode([method, *((dtype.str, shape) for dtype, shape in arrays)]).encode()
    if len(text) > MAX_SIGNATURE:
        raise WireError(f"{len(arrays)} buffers are too many for one frame")
    return text


@functools.lru_cache
def _read_signature(text: bytes) -> tuple[str, tuple[Spec, ...], int]:
    """Returns the method's name, the buffers' dtypes and shapes, and their size in bytes."""
    try:
        method, *entries = _decode(text.decode())
        specs = tuple(_spec(name, shape) for name, shape in entries)
        if not isinstance(method, str):
            raise TypeError
    except (TypeError, ValueError, RecursionError):
        raise WireError(
            f"a frame's signature is a name, dtypes and shapes in JSON, not {text[:60]!r}"
        ) from None
    # numpy computes the strides of an empty array from its other sizes, so these count as well.
    largest = sum(dtype.itemsize * math.prod(n or 1 for n in shape) for dtype, shape in specs)
    if largest > MAX_BYTES:
        raise WireError(f"a frame has at most {MAX_BYTES} bytes of buffers, not {largest}")
    return method, specs, sum(dtype.itemsize * math.prod(shape) for dtype, shape in specs)


def _spec(name: object, shape: object) -> Spec:
    if not isinstance(name, str) or name not in _DTYPES or not isinstance(shape, list):
        raise TypeError
    if len(shape) > 32 or not all(type(size) is int and 0 <= size <= MAX_BYTES for size in shape):
        raise ValueError
    return _DTYPES[name], tuple(shape)
