"""The memory of simulated devices: what a step frees is kept for the next one.

[Note: Kept memory]
glibc gives large freed blocks back to the system, which hands out the next step's page by page: a
small CNN spent 10 of its 33 ms a step in 5000 page faults. PyTorch's allocator for GPUs keeps what
is freed; with several simulated devices the C library is told to do so, in the whole process, by
the parameters that ``mallopt(3)`` describes. ``close`` gives back what is free then.
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
    """Has the C library keep freed memory, unless the user has set the like; glibc alone can."""
    library = _library()
    is_set = "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")
    if library is None or is_set or any(name in os.environ for name in _OF_USERS):
        return
    library.mallopt(_MMAP_THRESHOLD, _LARGEST_BLOCK_KEPT)
    library.mallopt(_TRIM_THRESHOLD, _MOST_BYTES_KEPT)


def give_back_freed_memory() -> None:
    """Gives the system what is free now."""
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
