"""The masked CRC-32C that guards lengths and data in TFRecord files, and a search for it."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

# A search knows lengths, 8 bytes each, below 2**40 (1 TiB): their upper bytes are zero.
NUM_LENGTH_BYTES = 5
MASK = 0xA282EAD8


def masked_crc32c(data: bytes) -> int:
    """Returns the CRC-32C of ``data``, rotated and offset as TFRecord files store it.

    The mask keeps the checksum of data that holds checksums itself from being trivial (format:
    tensorflow/core/lib/hash/crc32c.h).

    Raises:
        ImportError: google-crc32c is not installed.
    """
    crc = crc32c_function()(data)
    return ((crc >> 15 | crc << 17) + MASK) & 0xFFFFFFFF


def find_length(window: bytes) -> int | None:
    """Returns where in ``window`` the first length with its checksum lies.

    All places are looked at together: some 20 ms for a MiB, whatever it holds.
    """
    data = np.frombuffer(window, np.uint8)
    num_places = len(window) - 11
    if num_places < 1:
        return None
    columns = [data[i : i + num_places] for i in range(12)]
    upper = functools.reduce(np.bitwise_or, columns[NUM_LENGTH_BYTES:8])
    # Zeros, the usual filling, are no length: the checksum of one is not zero.
    others = functools.reduce(np.bitwise_or, columns[:NUM_LENGTH_BYTES] + columns[8:])
    places = np.flatnonzero((upper == 0) & (others != 0))
    if not places.size:
        return None
    tables = _tables()
    crc = np.full(places.size, crc32c_function()(bytes(8)), np.uint32)
    for i in range(NUM_LENGTH_BYTES):
        crc ^= tables[i][data[places + i]]
    masked = (crc >> np.uint32(15) | crc << np.uint32(17)) + np.uint32(MASK)
    stored = np.zeros(places.size, np.uint32)
    for i in range(4):
        stored |= data[places + 8 + i].astype(np.uint32) << np.uint32(8 * i)
    found = np.flatnonzero(masked == stored)
    return int(places[found[0]]) if found.size else None


@functools.cache
def _tables() -> NDArray[np.uint32]:
    """Returns what each byte of a length adds to its CRC: uint32 [NUM_LENGTH_BYTES, 256].

    A CRC is linear: that of several bytes is the exclusive or of what each adds.
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
