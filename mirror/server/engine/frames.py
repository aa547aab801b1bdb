"""Frames: what goes over a connection. A head, JSON, and raw buffers; nothing is pickled.

::

    "mir1"  kind  JSON's length  number     17 bytes, little-endian
    {"h": header, "b": [["<f4", [3, 4]], ...], ...}
    the bytes of the buffers, one after another

The kernel takes buffers where they are and puts them where they are to be: no copy is made here,
but of what is small.
"""

from __future__ import annotations

import json
import math
import socket
import struct
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mirror.errors import in_words
from mirror.server.engine.protocol import Array, Sendable, WireError

CALL, ANSWER, RAISED = range(3)

MAX_HEADER = 64 << 20
"""Bytes of JSON in one frame."""
MAX_BYTES = 64 << 30
"""Bytes of all buffers of one frame."""

_MAGIC = b"mir1"
_HEAD = struct.Struct("<4sBIQ")
_STAGING = 1 << 16
_AT_ONCE = 256  # buffers that one system call takes; Linux allows 1024
_KINDS = "biufc"

Content = dict[str, Any]
Place = Callable[[int, list[tuple[np.dtype[Any], tuple[int, ...]]]], "list[Array] | None"]
"""Says where the buffers of a frame, by its number, are to be received; None: in new arrays."""


@dataclass(frozen=True)
class Frame:
    """What has come."""

    kind: int
    number: int
    content: Content
    buffers: list[Array]


class Outgoing:
    """A frame on its way out, as far as the socket takes it."""

    def __init__(
        self, kind: int, number: int, content: Content, buffers: Sequence[Sendable]
    ) -> None:
        arrays = [_array(buffer) for buffer in buffers]
        specs = [[array.dtype.str, array.shape] for array in arrays]
        try:
            text = json.dumps({**content, "b": specs}, separators=(",", ":")).encode()
        except (TypeError, ValueError) as error:
            raise WireError(f"a header is JSON: {error}; send data as buffers") from None
        if len(text) > MAX_HEADER:
            raise WireError(
                f"a header has at most {MAX_HEADER} bytes of JSON, this one has {len(text)}; send "
                "data as buffers"
            )
        pieces = [memoryview(_HEAD.pack(_MAGIC, kind, len(text), number) + text)]
        pieces += [array.reshape(-1).view(np.uint8).data for array in arrays if array.nbytes]
        self._pieces = pieces
        self._next = 0

    def send(self, sock: socket.socket) -> bool:
        """Gives a socket that does not block what it takes; returns whether that was the rest."""
        while self._next < len(self._pieces):
            try:
                sent = sock.sendmsg(self._pieces[self._next : self._next + _AT_ONCE])
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

    def keep(self) -> int:
        """Copies what is not sent yet, for whoever changes the buffers; returns its bytes."""
        rest = b"".join(self._pieces[self._next :])
        self._pieces, self._next = [memoryview(rest)], 0
        return len(rest)


def _array(buffer: Sendable) -> Array:
    array = buffer if isinstance(buffer, np.ndarray) else _of_bytes(buffer)
    if array.dtype.kind not in _KINDS:
        raise WireError(
            f"a buffer holds plain numbers; got {in_words(buffer)}; of a bfloat16 tensor send "
            "tensor.view(torch.uint16).numpy()"
        )
    return np.ascontiguousarray(array) if array.ndim else array


def _of_bytes(buffer: object) -> Array:
    try:
        return np.frombuffer(buffer, np.uint8)  # type: ignore[call-overload, no-any-return]
    except (TypeError, ValueError):
        raise WireError(
            f"a buffer is a numpy array or bytes; got {in_words(buffer)}; of a tensor send "
            "tensor.numpy()"
        ) from None


class Reader:
    """What comes from a socket that does not block, as frames.

    Args:
        place: says where large buffers go; without it all get arrays of their own.
    """

    def __init__(self, sock: socket.socket, place: Place | None = None) -> None:
        self._sock, self._place = sock, place
        self._staging = memoryview(bytearray(_STAGING))
        self._start = self._end = 0
        # What an interrupt ends for good: nobody knows any more where in a frame this is.
        self._steps = self._run()

    @property
    def has_more(self) -> bool:
        """Whether something has come that is not in a frame yet."""
        return self._start < self._end

    def receive(self) -> Frame | None:
        """Returns the next frame, None if it has not come wholly yet.

        Raises:
            EOFError: the other side has closed the connection, or it was lost.
            WireError: what came is no frame.
        """
        try:
            return next(self._steps)
        except StopIteration:
            raise WireError("reading a frame was interrupted") from None
        except ConnectionError as error:
            raise EOFError(str(error)) from None

    def _run(self) -> Generator[Frame | None, None, None]:
        head = memoryview(bytearray(_HEAD.size))
        while True:
            yield from self._fill(head)
            magic, kind, length, number = _HEAD.unpack(head)
            if magic != _MAGIC or kind > RAISED or length > MAX_HEADER:
                raise WireError(f"a frame begins with {_MAGIC!r}; got {bytes(head)!r}")
            text = bytearray(length)
            yield from self._fill(memoryview(text))
            content, specs = _parsed(text)
            buffers = self._place(number, specs) if self._place else None
            if buffers is None:
                buffers = [np.empty(shape, dtype) for dtype, shape in specs]
            for buffer in buffers:
                if buffer.nbytes:
                    yield from self._fill(buffer.reshape(-1).view(np.uint8).data)
            yield Frame(kind, number, content, buffers)

    def _fill(self, view: memoryview) -> Generator[None, None, None]:
        while view.nbytes:
            if self._start < self._end:
                count = min(view.nbytes, self._end - self._start)
                view[:count] = self._staging[self._start : self._start + count]
                self._start += count
                view = view[count:]
                continue
            is_large = view.nbytes >= _STAGING
            try:
                count = self._sock.recv_into(view if is_large else self._staging)
            except BlockingIOError:
                yield None
                continue
            if not count:
                raise EOFError("the other side has closed the connection")
            if is_large:
                view = view[count:]
            else:
                self._start, self._end = 0, count


def _parsed(text: bytearray) -> tuple[Content, list[tuple[np.dtype[Any], tuple[int, ...]]]]:
    try:
        content = json.loads(text)
        if not isinstance(content, dict):
            raise TypeError
        specs = [(_dtype(name), _shape(shape)) for name, shape in content.pop("b")]
    except (TypeError, ValueError, KeyError, RecursionError, AttributeError):
        shown = bytes(text[:60])
        raise WireError(f"a frame's JSON says its buffers' dtypes and shapes: {shown!r}") from None
    total = sum(dtype.itemsize * math.prod(shape) for dtype, shape in specs)
    if total > MAX_BYTES:
        raise WireError(f"a frame has at most {MAX_BYTES} bytes of buffers, not {total}")
    return content, specs


def _dtype(name: object) -> np.dtype[Any]:
    if not isinstance(name, str) or len(name) > 4:
        raise TypeError
    dtype = np.dtype(name)
    if dtype.kind not in _KINDS or dtype.str != name:
        raise TypeError
    return dtype


def _shape(shape: object) -> tuple[int, ...]:
    if not isinstance(shape, list) or len(shape) > 32:
        raise TypeError
    if not all(type(size) is int and 0 <= size <= MAX_BYTES for size in shape):
        raise ValueError
    return tuple(shape)
