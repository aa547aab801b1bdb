"""Host memory of simulated devices: memory that a step frees stays in the process.

[Note: Kept memory]
Problem: glibc returns large freed blocks to the system, and the next step gets new ones page by
page. A small CNN spent 10 of its 33 ms per step in 5000 page faults.
Rule: as PyTorch's GPU allocator keeps freed memory, so does glibc with several simulated devices:
``mallopt(3)`` sets its thresholds for the whole process.
Consequence: the process keeps the memory until ``close`` returns it to the system.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_... of malloc.h
_MOST_BYTES_KEPT = 2**31 - 1  # all an int holds
_LARGEST_BLOCK_KEPT = 32 * 2**20  # glibc's limit; larger ones always are the system's
_OF_USERS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")


def keep_freed_memory() -> None:
    """Makes glibc keep freed memory, unless the environment sets malloc parameters."""
    library = _library()
    is_set = "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")
    if library is None or is_set or any(name in os.environ for name in _OF_USERS):
        return
    library.mallopt(_MMAP_THRESHOLD, _LARGEST_BLOCK_KEPT)
    library.mallopt(_TRIM_THRESHOLD, _MOST_BYTES_KEPT)


def give_back_freed_memory() -> None:
    """Returns free memory to the system."""
    library = _library()
    if library is not None:
        library.malloc_trim(0)


@cache
def _library() -> ctypes.CDLL | None:
    """Returns the C library if it is glibc."""
    try:
        library = ctypes.CDLL(None)
    except (OSError, TypeError):
        return None
    is_glibc = all(hasattr(library, name) for name in ("gnu_get_libc_version", "malloc_trim"))
    return library if is_glibc else None
