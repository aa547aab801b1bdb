"""Files compressed with GZIP or ZLIB, read and written as streams."""

from __future__ import annotations

import io
import zlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

# zlib's ``wbits``: 31 is GZIP, 15 is ZLIB, both with the largest window.
WINDOW_BITS = {"GZIP": 31, "ZLIB": 15}
CHUNK_BYTES = 2**16


def check_compression(compression: str | None) -> str | None:
    """Returns ``None``, ``"GZIP"`` or ``"ZLIB"``; an empty string is ``None``, as in TensorFlow.

    Raises:
        ValueError: the compression has another value.
    """
    if compression is not None and compression not in ("", *WINDOW_BITS):
        raise ValueError(f"compression must be None, 'GZIP' or 'ZLIB'; got {compression!r}")
    return compression or None


class InflatingFile(io.RawIOBase):
    """The decompressed bytes of a file, forward only; wrap it in an ``io.BufferedReader``.

    Concatenated streams are read one after another. Reading raises ``zlib.error`` if the bytes
    have another format, and ``EOFError`` if they end too early.
    """

    def __init__(self, path: str, compression: str) -> None:
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115  # closed by close
        self._window_bits = WINDOW_BITS[compression]
        self._inflate = zlib.decompressobj(self._window_bits)
        self._begun = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        view = memoryview(buffer).cast("B")
        while True:
            if self._inflate.eof:
                waiting = self._inflate.unused_data
                self._inflate, self._begun = zlib.decompressobj(self._window_bits), False
            else:
                waiting = self._inflate.unconsumed_tail
            compressed = waiting or self._file.read(CHUNK_BYTES) or b""
            if not compressed and not self._begun:
                return 0
            # At the end of the file zlib may still hold output that did not fit before.
            self._begun = True
            data = self._inflate.decompress(compressed, len(view))
            if data:
                view[: len(data)] = data
                return len(data)
            if not compressed and not self._inflate.eof:
                raise EOFError("the file ends inside its compressed data")

    def close(self) -> None:
        self._file.close()
        super().close()


class DeflatingFile:
    """A file that compresses the bytes written to it."""

    def __init__(self, path: str, compression: str) -> None:
        self._file = open(path, "wb")  # noqa: SIM115  # closed by close
        self._deflate = zlib.compressobj(wbits=WINDOW_BITS[compression])

    def write(self, data: bytes, /) -> int:
        self._file.write(self._deflate.compress(data))
        return len(data)

    def flush(self) -> None:
        """Makes all written bytes readable, at the cost of some bytes."""
        self._file.write(self._deflate.flush(zlib.Z_SYNC_FLUSH))
        self._file.flush()

    def close(self) -> None:
        if not self._file.closed:
            self._file.write(self._deflate.flush())
            self._file.close()
