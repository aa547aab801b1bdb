"""Reads the records of TFRecord files, in order or at an offset, and verifies every checksum.

Format: tensorflow/core/lib/io/record_writer.h; all numbers are little-endian

    uint64 length | uint32 masked CRC-32C of length | data | uint32 masked CRC-32C of data
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import struct
import zlib
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

from mirror.errors import RecordError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

# A search finds lengths below 2**40 (1 TiB): of their 8 bytes the upper 3 are zero.
NUM_LENGTH_BYTES = 5
MASK = 0xA282EAD8


def masked_crc32c(data: bytes) -> int:
    """Returns the CRC-32C of ``data``, rotated and offset as TFRecord files store it.

    Without the mask the checksum of data that contain their own checksum would be trivial
    (format: tensorflow/core/lib/hash/crc32c.h).

    Raises:
        ImportError: google-crc32c is not installed.
    """
    crc = crc32c_function()(data)
    return ((crc >> 15 | crc << 17) + MASK) & 0xFFFFFFFF


def find_length(window: bytes) -> int | None:
    """Returns the position in ``window`` of the first length that matches its checksum.

    All positions are tested at once, in some 20 ms for a MiB of any content.
    """
    data = np.frombuffer(window, np.uint8)
    num_positions = len(window) - 11
    if num_positions < 1:
        return None
    columns = [data[i : i + num_positions] for i in range(12)]
    upper = functools.reduce(np.bitwise_or, columns[NUM_LENGTH_BYTES:8])
    # Zeros, the usual padding, are no length: the checksum of length 0 is not zero.
    others = functools.reduce(np.bitwise_or, columns[:NUM_LENGTH_BYTES] + columns[8:])
    positions = np.flatnonzero((upper == 0) & (others != 0))
    if not positions.size:
        return None
    tables = _tables()
    crc = np.full(positions.size, crc32c_function()(bytes(8)), np.uint32)
    for i in range(NUM_LENGTH_BYTES):
        crc ^= tables[i][data[positions + i]]
    masked = (crc >> np.uint32(15) | crc << np.uint32(17)) + np.uint32(MASK)
    stored = np.zeros(positions.size, np.uint32)
    for i in range(4):
        stored |= data[positions + 8 + i].astype(np.uint32) << np.uint32(8 * i)
    found = np.flatnonzero(masked == stored)
    return int(positions[found[0]]) if found.size else None


@functools.cache
def _tables() -> NDArray[np.uint32]:
    """Returns each byte's contribution to a length's CRC: uint32 [NUM_LENGTH_BYTES, 256].

    A CRC is linear: the CRC of several bytes is the exclusive or of their contributions.
    """
    crc32c = crc32c_function()
    zero = crc32c(bytes(8))
    return np.array(
        [
            [crc32c(bytes(i) + bytes([byte]) + bytes(7 - i)) ^ zero for byte in range(256)]
            for i in range(NUM_LENGTH_BYTES)
        ],
        np.uint32,
    )


@functools.cache
def crc32c_function() -> Callable[[bytes], int]:
    """Returns google-crc32c's function, which uses the processor's CRC instruction.

    Raises:
        ImportError: google-crc32c is not installed.
    """
    try:
        import google_crc32c
    except ImportError as error:
        raise ImportError(
            "TFRecord files are read and written with CRC-32C checksums, which need the package "
            "google-crc32c; install it with: pip install 'mirror-strategy[tfrecord]'"
        ) from error
    value: Callable[[bytes], int] = google_crc32c.value
    return value


HEADER = struct.Struct("<QI")
FOOTER = struct.Struct("<I")
# Larger reads bypass the buffer, so that large records are copied once. Buffers of 8 and 32 times
# this size were no faster, and made a scan of lengths read the data between them.
BUFFER_BYTES = 2**13
# A damaged file may announce any length: a read asks for at most this much at once.
MAX_READ_BYTES = 2**26
SCAN_BYTES = 2**20
# A search starts with this much, and doubles it until SCAN_BYTES: if damage is frequent, the next
# record is near.
FIRST_SCAN_BYTES = 2**10
# A limit for records of compressed files: some kilobytes can decompress to gigabytes.
MAX_INFLATED_BYTES = 2**28
MAGIC = {b"\x1f\x8b": "GZIP", b"\x78\x01": "ZLIB", b"\x78\x9c": "ZLIB", b"\x78\xda": "ZLIB"}


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


_WRONG_LENGTH = (
    "its length does not match the length's checksum; the file is damaged, or is no TFRecord file"
)


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


class RecordReader:
    """Reads the records of one file in order.

    After a ``RecordError``, ``recover`` continues behind the damage. The reader never takes more
    memory than the file's size, or than twice ``MAX_INFLATED_BYTES`` for a compressed file.

    Attributes:
        record: the number of the next record, from 0.
        offset: the start of the next record, in bytes of the (decompressed) file.
    """

    def __init__(
        self, path: str, compression: str | None = None, *, offset: int = 0, record: int = 0
    ) -> None:
        """Opens a file before its record number ``record``, which begins at byte ``offset``.

        In a compressed file all bytes before it are read.

        Args:
            path: the file.
            compression: ``None``, ``"GZIP"`` or ``"ZLIB"``.
            offset: the offset of the first record to read.
            record: the number of that record.

        Raises:
            OSError: the file cannot be opened.
            RecordError: the file has another compression.
        """
        self.path = path
        self.record = record
        self.offset = offset
        self._compression = compression
        self._ahead = io.BytesIO()  # bytes of a compressed file that were read and put back
        self._lost = False
        self._ended = False
        self._file: BinaryIO
        _check_format(path, compression)
        if compression is None:
            self._num_bytes = os.stat(path).st_size
            self._file = open(path, "rb", buffering=BUFFER_BYTES)  # noqa: SIM115
        else:
            inflated = io.BufferedReader(InflatingFile(path, compression), BUFFER_BYTES)
            self._file = cast(BinaryIO, inflated)
        try:
            if not self._skip_bytes(offset):
                raise self._error("the file ends before this record")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> RecordReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    def read(self) -> bytes | None:
        """Returns the next record; ``None`` at the end.

        Raises:
            RecordError: the record is damaged or cut off.
        """
        length = self._length()
        if length is None:
            return None
        self._check_length(length)
        data = self._take(length)
        footer = self._take(FOOTER.size)
        if len(data) < length or len(footer) < FOOTER.size:
            raise self._truncation_error(length)
        error = _data_error(self.path, self.record, self.offset, data, footer)
        self._advance(length)
        if error is not None:
            raise error
        return data

    def skip(self) -> bool:
        """Skips the next record without reading its data; returns False at the end.

        Raises:
            RecordError: the record's length is damaged, or the record is cut off.
        """
        length = self._length()
        if length is None:
            return False
        if not self._skip_bytes(length + FOOTER.size):
            raise self._truncation_error(length)
        self._advance(length)
        return True

    def recover(self) -> None:
        """Moves to the next readable record, or to the end, after a ``RecordError``.

        If only data are damaged, that is the next record. If a length is damaged, the next record
        may begin anywhere: the following bytes are searched for a length that matches its
        checksum (a random position matches once in 2**32). The bytes before it get no record
        number. A cut-off record ends the file. Damaged compression also does, and loses up to 8
        KiB of the records before it.
        """
        if self._lost:
            self._lost = False
            with contextlib.suppress(RecordError):  # the compression may be damaged too
                self._search()

    def _advance(self, length: int) -> None:
        self.record += 1
        self.offset += HEADER.size + length + FOOTER.size

    def _length(self) -> int | None:
        """Reads the length of the next record; returns ``None`` at the end."""
        header = b"" if self._ended else self._take(HEADER.size)
        if not header:
            return None
        if len(header) < HEADER.size:
            raise self._truncation_error(None)
        length = _length_in(header)
        if length is None:
            self._lost = True
            self._put_back(header)
            raise self._error(_WRONG_LENGTH)
        return length

    def _check_length(self, length: int) -> None:
        """Raises ``RecordError`` if a length exceeds the file's size, or the limit."""
        if self._compression is None:
            if length > os.stat(self._file.fileno()).st_size:
                raise self._truncation_error(length)
        elif length > MAX_INFLATED_BYTES:
            self._ended = True
            raise self._error(
                f"records of compressed files have at most {MAX_INFLATED_BYTES} bytes, so that "
                f"small files cannot fill the memory; this one says it has {length}; write "
                "larger records without compression",
            )

    def _search(self) -> None:
        """Moves to the next length that matches its checksum, or to the end."""
        self._take(1)
        self.offset += 1
        size = FIRST_SCAN_BYTES
        while True:
            window = self._take(size)
            size = min(2 * size, SCAN_BYTES)
            if len(window) < HEADER.size:
                self.offset += len(window)
                return
            found = find_length(window)
            if found is not None:
                self._put_back(window[found:])
                self.offset += found
                return
            kept = HEADER.size - 1
            self._put_back(window[-kept:])
            self.offset += len(window) - kept

    def _take(self, size: int) -> bytes:
        """Returns the next ``size`` bytes; fewer at the end of the file."""
        pieces = []
        if ahead := self._ahead.read(size):
            pieces.append(ahead)
            size -= len(ahead)
        try:
            while size and (piece := self._file.read(min(size, MAX_READ_BYTES))):
                pieces.append(piece)
                size -= len(piece)
        except (zlib.error, EOFError) as error:
            self._ended = True
            raise self._error(
                f"the {self._compression} compression is damaged, so the rest of the file cannot "
                f"be read ({error}); copy or write the file again",
            ) from error
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _put_back(self, data: bytes) -> None:
        """Returns bytes to the input, so that the next read starts with them."""
        if self._compression is None:
            self._file.seek(-len(data), os.SEEK_CUR)
        else:
            self._ahead = io.BytesIO(data + self._ahead.read())

    def _skip_bytes(self, size: int) -> bool:
        """Skips ``size`` bytes; returns False if there are fewer, at an undefined position."""
        if self._compression is None:
            if self._file.tell() + size > self._num_bytes:
                return False
            self._file.seek(size, os.SEEK_CUR)
            return True
        while size:
            passed = len(self._take(min(size, SCAN_BYTES)))
            if not passed:
                return False
            size -= passed
        return True

    def _truncation_error(self, length: int | None) -> RecordError:
        self._ended = True
        needs = "its length" if length is None else f"its {length} bytes and their checksum"
        return self._error(
            f"the file ends before {needs}; it was cut off, or is still being written"
        )

    def _error(self, what: str) -> RecordError:
        """Returns the error for a fault of the next record."""
        return RecordError.at_record(self.path, self.record, self.offset, what)


def read_record(file: int, path: str, record: int, offset: int) -> bytes:
    """Returns the record at an offset of an uncompressed file.

    Args:
        file: a file descriptor; its position is neither used nor changed, so that threads and
            forked processes can share it.
        path: the file's path, for errors.
        record: the record's number, for errors.
        offset: the start of the record, in bytes.

    Raises:
        RecordError: the record is damaged or cut off, or none begins at the offset.
    """
    header = os.pread(file, HEADER.size, offset)
    length = _length_in(header) if len(header) == HEADER.size else None
    if length is None:
        raise RecordError.at_record(path, record, offset, _WRONG_LENGTH)
    begin = offset + HEADER.size
    data = footer = b""
    if begin + length + FOOTER.size <= os.fstat(file).st_size:
        data = os.pread(file, length, begin)
        while len(data) < length:  # one call reads at most 2 GiB
            more = os.pread(file, length - len(data), begin + len(data))
            if not more:
                break
            data += more
        footer = os.pread(file, FOOTER.size, begin + length)
    if len(data) < length or len(footer) < FOOTER.size:
        raise RecordError.at_record(
            path, record, offset, f"the file ends before its {length} bytes; it was cut off"
        )
    error = _data_error(path, record, offset, data, footer)
    if error is not None:
        raise error
    return data


def _length_in(header: bytes) -> int | None:
    """Returns the length in a header; ``None`` if its checksum does not match."""
    length: int
    length, checksum = HEADER.unpack(header)
    return length if masked_crc32c(header[:8]) == checksum else None


def _check_format(path: str, compression: str | None) -> None:
    """Raises ``RecordError`` if a file has another compression than ``compression``."""
    with open(path, "rb", buffering=0) as file:
        head = file.read(HEADER.size) or b""
    if len(head) == HEADER.size and _length_in(head) is not None:
        found = None
    elif head[:2] in MAGIC:
        found = MAGIC[head[:2]]
    else:
        return
    if found != compression:
        raise RecordError.at_record(
            path,
            0,
            0,
            f"the file does not have compression={compression!r}; from its first bytes it is "
            f"compression={found!r}",
        )


def _data_error(
    path: str, record: int, offset: int, data: bytes, footer: bytes
) -> RecordError | None:
    if masked_crc32c(data) == FOOTER.unpack(footer)[0]:
        return None
    return RecordError.at_record(
        path, record, offset, f"its {len(data)} bytes are damaged: their checksum does not match"
    )
