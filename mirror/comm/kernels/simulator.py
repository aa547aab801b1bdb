"""Simulated devices, which run the kernels of csrc/ on CPU threads (csrc/host/simulate.cpp)."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mirror.comm.communicator import DTYPES
from mirror.comm.kernels.launcher import FLAG_BYTES, KernelArguments, Machine, workspace_bytes
from mirror.comm.registry import unusable_reason
from mirror.errors import BackendError

PATH = Path(__file__).parents[1] / "_simulate.so"

# More than one, so that barriers and the division of work are tested; few, since each is an OS
# thread: 8 replicas have 16 or 32 threads.
_THREADS_PER_BLOCK = 2
_DEFAULT_BLOCKS = 2
_MAX_BLOCKS = 16


class SimulatedGpus(Machine):
    """Devices that are threads of the CPU; a call returns when all threads are done.

    Attributes:
        absent: a bit mask of replicas that do not take part, for tests of timeouts.
        moved: None, or an int64 matrix. Kernels add to ``moved[i, j]`` the bytes of tensors and
            scratch memory that go from replica ``i`` to replica ``j``.
    """

    bytes_per_block = 16 * 1024

    def __init__(
        self, num_replicas: int, scratch_bytes: int, max_blocks: int | None = None
    ) -> None:
        """Allocates the workspaces.

        Raises:
            ValueError: ``max_blocks`` is not positive, or larger than 16.
        """
        self.max_blocks = _DEFAULT_BLOCKS if max_blocks is None else max_blocks
        if not 1 <= self.max_blocks <= _MAX_BLOCKS:
            raise ValueError(
                f"simulated devices have 1 to {_MAX_BLOCKS} blocks; got max_blocks={max_blocks}"
            )
        self.block_limits = ((sys.maxsize, self.max_blocks),)
        self.absent = 0
        self.moved: Tensor | None = None
        self._scratch_bytes = scratch_bytes
        self._errors = _aligned_zeros(num_replicas * FLAG_BYTES)
        num_bytes = workspace_bytes(self.max_blocks, scratch_bytes)
        self._workspaces = [_aligned_zeros(num_bytes) for _ in range(num_replicas)]

    def prepare(self, calls: Iterable[tuple[str, torch.dtype, KernelArguments]]) -> None:
        """Does nothing: all kernels were compiled when mirror was built."""

    def run(
        self, kernel: str, dtype: torch.dtype, arguments: KernelArguments, blocks: int
    ) -> None:
        num_replicas = len(self._workspaces)
        self._set_memory(arguments)
        arguments.rows[:num_replicas] = range(num_replicas)
        result = simulator_library().mirror_simulate(
            (ctypes.c_char_p * 1)(kernel.encode()),
            (ctypes.c_int * 1)(DTYPES.index(dtype)),
            ctypes.byref(arguments),
            1,  # call
            blocks,
            _THREADS_PER_BLOCK,
            self.absent,
            None if self.moved is None else self.moved.data_ptr(),
        )
        if result != 0:
            threads = num_replicas * blocks * _THREADS_PER_BLOCK
            why = "no such kernel", f"the system refused {threads} threads"
            raise BackendError(f"the simulated devices could not run {kernel}: {why[result - 1]}")

    def reset(self) -> None:
        for memory in (self._errors, *self._workspaces):
            memory.zero_()

    def close(self) -> None:
        self._workspaces = []


@cache
def simulator_missing_reason() -> str | None:
    """Returns why simulated devices cannot be used; ``None`` if they can."""
    return unusable_reason(
        PATH,
        lambda: bool(
            simulator_library().mirror_arguments_bytes() == ctypes.sizeof(KernelArguments)
        ),
    )


@cache
def simulator_library() -> ctypes.CDLL:
    """Returns the library of this process; the first call loads it."""
    loaded = ctypes.CDLL(str(PATH))
    loaded.mirror_simulate.argtypes = [
        ctypes.POINTER(ctypes.c_char_p),
        ctypes.POINTER(ctypes.c_int),
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_uint,
        ctypes.c_void_p,
    ]
    loaded.mirror_widen.argtypes = [ctypes.c_int, ctypes.c_uint]
    loaded.mirror_widen.restype = ctypes.c_float
    loaded.mirror_narrow.argtypes = [ctypes.c_int, ctypes.c_float]
    loaded.mirror_narrow.restype = ctypes.c_uint
    return loaded


def _aligned_zeros(num_bytes: int) -> Tensor:
    """Returns zeros with the alignment of a flag."""
    # NumPy does not touch the pages, and a workspace is seldom used completely.
    memory = torch.from_numpy(np.zeros(num_bytes + FLAG_BYTES, dtype=np.uint8))
    return memory[-memory.data_ptr() % FLAG_BYTES :][:num_bytes]
