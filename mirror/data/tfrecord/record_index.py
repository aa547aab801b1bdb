"""The index of uncompressed TFRecord files: offsets of their records, from a scan or a saved file.

``OpenFiles`` reads records by number, and keeps the files open between accesses.
"""

from __future__ import annotations

import io
import os
import stat
import weakref
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mirror.base.safe_files import replace_atomically
from mirror.data.tfrecord.record_reader import RecordReader, masked_crc32c, read_record
from mirror.errors import RecordError

SUFFIX = ".index.npy"
# The number of int64 fields before the offsets in a saved index.
NUM_FIELDS = 4
# The size of an empty record: its length, the length's checksum and the data's checksum.
MIN_RECORD_BYTES = 16
# With more damage than this the file is no TFRecord file, and errors would fill the memory.
MAX_DAMAGE = 100_000


@dataclass(frozen=True)
class RecordIndex:
    """The records of one file.

    Attributes:
        offsets: the records' offsets, int64 of shape [number of records].
        damaged: the numbers of records with damaged data.
        damage: the errors that a scan has found, in records and between them.
    """

    offsets: NDArray[np.int64]
    damaged: tuple[int, ...] = ()
    damage: tuple[RecordError, ...] = ()


class Numbering:
    """Numbers the records of several files consecutively."""

    def __init__(self, files: Sequence[RecordIndex]) -> None:
        self._files = tuple(files)
        self._ends = np.cumsum([len(file.offsets) for file in files], dtype=np.int64)

    @property
    def damage(self) -> tuple[RecordError, ...]:
        return tuple(error for file in self._files for error in file.damage)

    def intact_numbers(self, num_shards: int, shard: int) -> NDArray[np.int64]:
        """Returns the numbers of intact records: every ``num_shards``-th one from ``shard``."""
        numbers = np.arange(shard, self._ends[-1], num_shards, dtype=np.int64)
        starts = self._ends - [len(file.offsets) for file in self._files]
        damaged = [
            start + record
            for start, file in zip(starts.tolist(), self._files, strict=True)
            for record in file.damaged
        ]
        return np.setdiff1d(numbers, damaged, assume_unique=True) if damaged else numbers

    def locate(self, number: int) -> tuple[int, int, int]:
        """Returns the file of a record, its number in that file, and its offset."""
        file = int(np.searchsorted(self._ends, number, side="right"))
        offsets = self._files[file].offsets
        record = number - int(self._ends[file]) + len(offsets)
        return file, record, int(offsets[record])


def scan(path: str, *, verify: bool) -> RecordIndex:
    """Finds the records of a file.

    Args:
        path: an uncompressed file.
        verify: whether to read the data too, and to list damage; else only lengths are read.

    Raises:
        OSError: the file cannot be read.
        RecordError: a length is damaged, or the last record is cut off (without ``verify``).
    """
    offsets = array("q")
    damaged: list[int] = []
    damage: list[RecordError] = []
    with RecordReader(path) as reader:
        while True:
            record, offset = reader.record, reader.offset
            try:
                more = reader.read() is not None if verify else reader.skip()
            except RecordError as error:
                if not verify:
                    raise
                damage.append(error.with_traceback(None))  # frames of a traceback hold data
                if len(damage) > MAX_DAMAGE:
                    raise damage_error(path) from error
                more = True
                if reader.record > record:
                    damaged.append(record)
            if not more:
                return RecordIndex(np.frombuffer(offsets, np.int64), tuple(damaged), tuple(damage))
            if reader.record > record:
                offsets.append(offset)
            else:
                reader.recover()


def load_or_scan(path: str, *, verify: bool) -> RecordIndex:
    """Returns the index that is saved beside the file; scans the file if none fits.

    The index is saved as ``<path>.index.npy``, replaced atomically. It fits while the file has the
    same size and time of modification, and if it was verified or ``verify`` is false. The index
    of a damaged file is not saved.

    Raises:
        OSError: the file cannot be read, or the index cannot be written.
        RecordError: see ``scan``.
    """
    status = os.stat(path)  # before the scan, so that a file that changes meanwhile does not fit
    offsets = _load(path + SUFFIX, status, verify=verify)
    if offsets is not None:
        return RecordIndex(offsets)
    index = scan(path, verify=verify)
    if not index.damage:
        _save(path + SUFFIX, status, index.offsets, verified=verify)
    return index


def _load(path: str, status: os.stat_result, *, verify: bool) -> NDArray[np.int64] | None:
    """Returns the saved offsets; ``None`` if there are none or they do not fit.

    The file is untrusted and not parsed: its header must be that of an index of its size, and the
    size must be possible for this file.
    """
    content = _content(path, (NUM_FIELDS + status.st_size // MIN_RECORD_BYTES) * 8 + 2**12)
    header = _header((len(content) - len(_header(0))) // 8)
    if not content.startswith(header) or (len(content) - len(header)) % 8:
        return None
    kept = np.frombuffer(content, "<i8", offset=len(header))
    if kept.size < NUM_FIELDS:
        return None
    num_bytes, modified, verified, checksum = kept[:NUM_FIELDS].tolist()
    offsets = kept[NUM_FIELDS:]
    fits = (
        num_bytes == status.st_size
        and modified == status.st_mtime_ns
        and (verified == 1 or not verify)
        and checksum == _checksum(kept[: NUM_FIELDS - 1], offsets)
        and bool(np.all(np.diff(offsets, prepend=-MIN_RECORD_BYTES) >= MIN_RECORD_BYTES))
        and (not offsets.size or int(offsets[-1]) <= status.st_size - MIN_RECORD_BYTES)
    )
    return offsets if fits else None


def _checksum(facts: NDArray[np.int64], offsets: NDArray[np.int64]) -> int:
    return masked_crc32c(facts.tobytes() + offsets.tobytes())


def _content(path: str, max_bytes: int) -> bytes:
    """Returns the bytes of a regular file of at most ``max_bytes``; no bytes of any other."""
    try:
        # Non-blocking, since opening a pipe would wait for a writer.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            status = os.fstat(file.fileno())
            if stat.S_ISREG(status.st_mode) and status.st_size <= max_bytes:
                return file.read(max_bytes)
    except OSError:
        pass
    return b""


def _header(num_values: int) -> bytes:
    """Returns the header that ``numpy.save`` writes before ``num_values`` int64."""
    header = io.BytesIO()
    facts = {"descr": "<i8", "fortran_order": False, "shape": (max(num_values, 0),)}
    np.lib.format.write_array_header_1_0(header, facts)
    return header.getvalue()


def _save(
    path: str, status: os.stat_result, offsets: NDArray[np.int64], *, verified: bool
) -> None:
    facts = np.array([status.st_size, status.st_mtime_ns, int(verified)], "<i8")
    offsets = offsets.astype("<i8")
    fields = np.append(facts, _checksum(facts, offsets))
    # The index gets the data file's permissions.
    with replace_atomically(path, status.st_mode & 0o666) as file:
        file.write(_header(NUM_FIELDS + len(offsets)))
        file.write(fields.tobytes() + offsets.tobytes())


def damage_error(path: str) -> RecordError:
    """Returns the error for a file with too many damaged records."""
    return RecordError(
        f"on_damage='skip' skips at most {MAX_DAMAGE} damaged records; {path} has more: it is no "
        "TFRecord file, or must be written again"
    )


# Beyond this number, files are opened for each access.
MAX_OPEN_FILES = 128


class OpenFiles:
    """The files of a dataset, opened at the first access; a copy opens them again.

    Several threads may read at once.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = paths
        self._descriptors: dict[int, int] = {}
        weakref.finalize(self, _close, self._descriptors)

    def __reduce__(self) -> tuple[Any, ...]:
        return OpenFiles, (self._paths,)

    def read(self, file: int, record: int, offset: int) -> bytes:
        """Returns a record of a file.

        Args:
            file: the index of the file.
            record: the record's number in the file, for errors.
            offset: the record's offset, in bytes.

        Raises:
            RecordError: the record is damaged.
        """
        path = self._paths[file]
        descriptor = self._descriptors.get(file)
        if descriptor is None:
            opened = os.open(path, os.O_RDONLY)
            if len(self._descriptors) >= MAX_OPEN_FILES:
                try:
                    return read_record(opened, path, record, offset)
                finally:
                    os.close(opened)
            descriptor = self._descriptors.setdefault(file, opened)
            if descriptor != opened:  # another thread was faster
                os.close(opened)
        return read_record(descriptor, path, record, offset)


def _close(descriptors: dict[int, int]) -> None:
    while descriptors:
        os.close(descriptors.popitem()[1])
