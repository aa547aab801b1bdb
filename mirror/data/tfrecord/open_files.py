"""OpenFiles: files that records are read from by number, kept open between the accesses."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from typing import Any

from mirror.data.tfrecord.tfrecord import read_record

# More files than this are opened for each access.
MAX_OPEN_FILES = 128


class OpenFiles:
    """The files of a dataset, opened at the first access. Copies open them for themselves.

    Several threads may read at once.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = paths
        self._descriptors: dict[int, int] = {}
        weakref.finalize(self, _close, self._descriptors)

    def __reduce__(self) -> tuple[Any, ...]:
        return OpenFiles, (self._paths,)

    def read(self, file: int, record: int, offset: int) -> bytes:
        """Returns a record of the file of that number.

        Raises:
            RecordError: it is damaged.
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
