"""Launches the kernels of one collective on all GPUs, by one call of a C++ library.

csrc/host/launch.cpp explains why Python does not launch them in turn. This has run on one GPU, and
not yet on several; the tests run the same library with a driver of their own.

It also packs the arguments of the kernels in csrc/. A ``Machine`` runs them: GPUs, or simulated
devices.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from mirror.comm.collective_lock import launch_order
from mirror.comm.registry import unusable_reason
from mirror.errors import BackendError

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


class Machine(ABC):
    """Runs kernels on all replicas, and owns their workspaces.

    Attributes:
        max_blocks: the number of thread blocks for which each replica's workspace has room.
        bytes_per_block: the bytes of a message for which a replica uses one block.
        block_limits: pairs of bytes and blocks, both ascending: for a message of up to so many
            bytes, a kernel has at most so many blocks on each replica. The last is ``max_blocks``.
    """

    max_blocks: int
    bytes_per_block: int
    block_limits: Sequence[tuple[int, int]]
    _errors: Tensor  # one flag per replica, on the host
    _workspaces: list[Tensor]
    _scratch_bytes: int

    @abstractmethod
    def prepare(self, calls: Iterable[tuple[str, torch.dtype, KernelArguments]]) -> None:
        """Compiles the kernels for calls of ``run``; without it, ``run`` compiles them."""

    @abstractmethod
    def run(
        self, kernel: str, dtype: torch.dtype, arguments: KernelArguments, blocks: int
    ) -> None:
        """Enqueues the kernel for all replicas; sets the addresses of the workspaces."""

    def _set_memory(self, arguments: KernelArguments) -> None:
        """Sets the addresses and sizes of the workspaces."""
        arguments.workspace[: len(self._workspaces)] = [w.data_ptr() for w in self._workspaces]
        arguments.errors = self._errors.data_ptr()
        arguments.scratch_bytes = self._scratch_bytes
        arguments.state_blocks = self.max_blocks

    def error_words(self) -> list[int]:
        """Returns the error word of each replica, 0 for none; does not wait for the devices."""
        words: list[int] = self._errors.view(torch.int32)[:: FLAG_BYTES // 4].tolist()
        return [word & 0xFFFFFFFF for word in words]

    def abort(self) -> None:
        """Ends the waits of running kernels, which poll these words, from any thread."""
        self._errors.view(torch.int32)[:: FLAG_BYTES // 4].fill_(ABORTED)

    @abstractmethod
    def reset(self) -> None:
        """Waits for the devices, and clears the workspaces and the error words."""

    @abstractmethod
    def close(self) -> None:
        """Frees the memory."""


PATH = Path(__file__).parents[1] / "_launch.so"
DRIVER = "libcuda.so.1"
NAMES = (
    *"cuInit cuDeviceGet cuDevicePrimaryCtxRetain cuCtxGetCurrent cuCtxSetCurrent".split(),
    *"cuLaunchKernelEx cuGetErrorString".split(),
)
"""The driver's functions, in the order of the struct Driver in csrc/host/launch.cpp."""


class Launch(ctypes.Structure):
    """One kernel on one device: the struct of the same name in csrc/host/launch.cpp.

    A kernel has one parameter, a ``KernelArguments``, which the driver copies at the launch. Its
    grid is ``blocks`` x ``rows``, with a row for each replica of the device.
    """

    _fields_ = [
        ("function", ctypes.c_void_p),
        ("stream", ctypes.c_void_p),
        ("arguments", ctypes.POINTER(KernelArguments)),
        ("device", ctypes.c_int),
        ("blocks", ctypes.c_uint),
        ("rows", ctypes.c_uint),
        ("threads", ctypes.c_uint),
        ("is_cooperative", ctypes.c_int),
    ]


def launch(launches: Sequence[Launch], what: str) -> None:
    """Launches kernels in order, before those of another collective; releases the GIL.

    Args:
        what: the name of the kernels, for messages.

    Raises:
        BackendError: the driver refuses a kernel; the kernels before it are launched.
    """
    failed = ctypes.c_int()
    array = (Launch * len(launches))(*launches)
    result: int = launch_order.mutex.call(
        launcher_library().mirror_launch, array, len(launches), ctypes.byref(failed)
    )
    if result != 0:
        text = launcher_library().mirror_driver_error(result).decode()
        raise BackendError(
            f"the CUDA driver refused to launch {what} on cuda:{launches[failed.value].device}: "
            f"{text} ({result})"
        )


@cache
def launcher_missing_reason() -> str | None:
    """Returns why kernels cannot be launched; ``None`` if they can."""
    reason = unusable_reason(PATH, _is_current)
    if reason is not None:
        return reason
    try:
        driver = ctypes.CDLL(DRIVER)
        functions = [ctypes.cast(getattr(driver, name), ctypes.c_void_p).value for name in NAMES]
    except (OSError, AttributeError):
        functions = []
    if not functions or not launcher_library().mirror_use_driver(
        (ctypes.c_void_p * len(NAMES))(*functions)
    ):
        return f"the CUDA driver's library {DRIVER} does not load, or is older than CUDA 11.8"
    return None


def _is_current() -> bool:
    sizes = (launcher_library().mirror_launch_bytes(), launcher_library().mirror_driver_bytes())
    pointer = ctypes.sizeof(ctypes.c_void_p)
    return sizes == (ctypes.sizeof(Launch), len(NAMES) * pointer)


@cache
def launcher_library() -> ctypes.CDLL:
    """Returns the library of this process; the first call loads it."""
    loaded = ctypes.CDLL(str(PATH))
    loaded.mirror_launch.argtypes = [
        ctypes.POINTER(Launch),
        ctypes.c_int,
        ctypes.POINTER(ctypes.c_int),
    ]
    loaded.mirror_use_driver.argtypes = [ctypes.POINTER(ctypes.c_void_p)]
    loaded.mirror_use_driver.restype = ctypes.c_bool
    loaded.mirror_driver_error.restype = ctypes.c_char_p
    return loaded
