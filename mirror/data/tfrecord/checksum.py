"""The masked CRC-32C that guards lengths and data in TFRecord files."""

from __future__ import annotations

import functools
from collections.abc import Callable


def masked_crc32c(data: bytes) -> int:
    """Returns the CRC-32C of ``data``, rotated and offset as TFRecord files store it.

    The mask keeps the checksum of data that holds checksums itself from being trivial (format:
    tensorflow/core/lib/hash/crc32c.h).

    Raises:
        ImportError: google-crc32c is not installed.
    """
    crc = crc32c_function()(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


@functools.cache
def crc32c_function() -> Callable[[bytes], int]:
    """Returns google-crc32c's function, which uses the processor's own instruction.

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
