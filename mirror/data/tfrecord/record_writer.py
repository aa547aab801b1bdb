"""TFRecordWriter: writes records to a TFRecord file, which may be compressed."""

from __future__ import annotations

import os
import zlib
from types import TracebackType
from typing import BinaryIO

from mirror.data.tfrecord.record_reader import (
    FOOTER,
    HEADER,
    WINDOW_BITS,
    check_compression,
    crc32c_function,
    masked_crc32c,
)


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


class TFRecordWriter:
    """Writes records to a file that TensorFlow and ``TFRecordDataset`` read.

    .. code-block:: python

        with TFRecordWriter("train.tfrecord") as writer:
            writer.write(serialize_example({"image": jpeg, "label": 3}))

    An existing file of that name is replaced, as by ``open``. After an error the file has the
    records that were written before.
    """

    def __init__(self, path: str | os.PathLike[str], compression: str | None = None) -> None:
        """Creates the file.

        Args:
            path: the file; its directory exists.
            compression: ``None``, ``"GZIP"`` or ``"ZLIB"``. Compressed records can only be read
                in order.

        Raises:
            ImportError: google-crc32c is not installed.
            OSError: the file cannot be created.
            ValueError: the compression has another value.
        """
        compression = check_compression(compression)
        crc32c_function()
        self._closed = False
        self._file: BinaryIO | DeflatingFile
        if compression is None:
            self._file = open(path, "wb")  # noqa: SIM115  # closed by close
        else:
            self._file = DeflatingFile(os.fspath(path), compression)

    def __enter__(self) -> TFRecordWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def write(self, record: bytes | bytearray | memoryview) -> None:
        """Appends a record, of any length.

        Raises:
            TypeError: the record is not bytes.
            ValueError: the writer is closed.
        """
        if not isinstance(record, (bytes, bytearray, memoryview)):
            raise TypeError(
                f"a record is bytes; got a {type(record).__name__}; serialize features with "
                "mirror.data.serialize_example"
            )
        if self._closed:
            raise ValueError("the TFRecordWriter is closed; write before close()")
        data = bytes(record)
        length = HEADER.pack(len(data), 0)[:8]
        self._file.write(HEADER.pack(len(data), masked_crc32c(length)))
        self._file.write(data)
        self._file.write(FOOTER.pack(masked_crc32c(data)))

    def flush(self) -> None:
        """Flushes to the operating system, so that other processes can read the records."""
        self._file.flush()

    def close(self) -> None:
        """Finishes the file. Idempotent."""
        self._closed = True
        self._file.close()
