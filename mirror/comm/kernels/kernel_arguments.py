"""The arguments of the kernels in csrc/, and the sizes of their workspaces."""

from __future__ import annotations

import ctypes

MAX_REPLICAS = 16
PACK_BYTES = 16
# The flags and counters of one block in a replica's workspace, as in csrc/collective.h.
STATE_BYTES = 4096
# The size of a flag, and so of a replica's error word.
FLAG_BYTES = 128
# The error word of an abort by the host; a kernel's error word has its highest bit set.
ABORTED = 1


class KernelArguments(ctypes.Structure):
    """The struct ``Arguments`` of csrc/collective.h, which describes the fields."""

    _fields_ = [
        ("data", ctypes.c_uint64 * MAX_REPLICAS),
        ("workspace", ctypes.c_uint64 * MAX_REPLICAS),
        ("errors", ctypes.c_uint64),
        ("count", ctypes.c_int64),
        ("scratch_bytes", ctypes.c_int64),
        ("timeout_ns", ctypes.c_int64),
        ("scale", ctypes.c_double),
        ("num_replicas", ctypes.c_int32),
        ("op", ctypes.c_int32),
        ("root", ctypes.c_int32),
        ("element_bytes", ctypes.c_int32),
        ("state_blocks", ctypes.c_int32),
        ("island_size", ctypes.c_int32),
        ("rounds", ctypes.c_int32),
        ("call", ctypes.c_int32),
        ("rows", ctypes.c_int32 * MAX_REPLICAS),
        ("order", ctypes.c_int32 * MAX_REPLICAS),
        ("position", ctypes.c_int32 * MAX_REPLICAS),
    ]


def workspace_bytes(num_blocks: int, scratch_bytes: int) -> int:
    """Returns the size of a replica's workspace for a number of blocks."""
    return num_blocks * (STATE_BYTES + scratch_bytes)
