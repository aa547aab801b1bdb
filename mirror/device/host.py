"""The host: facts of the machine and of processes, memory, and OpenMP's teams of threads.

glibc returns large freed blocks to the system, and the next step gets new ones page by page: a
small CNN spent 10 of its 33 ms per step in 5000 page faults. So with several simulated devices
glibc keeps freed memory, as PyTorch's GPU allocator does: ``mallopt(3)`` sets its thresholds for
the whole process, until ``close`` returns the memory to the system.

OpenMP keeps a team for every thread that has run a parallel region, also for replicas that wait
for their turn. With more threads than CPUs, members of GNU OpenMP teams sleep instead of spinning,
so each operation wakes them, at tens of microseconds each. A step of many medium-sized operations
takes up to twice as long. So a thread that passes its turn on ends its team. That takes 1 us
without a team, 50 us with one, and 50 us to create it again; two replicas of two threads each took
0.71 to 1.0 of the time without, in 12 programs. Results have the same bits either way.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch

# IOMMU and ACS, which decide whether GPUs reach each other, are set on the kernel's command line.
_FILES = {"driver": "/proc/driver/nvidia/version", "command line": "/proc/cmdline"}
# Older versions of torch lack some of them.
_PROPERTIES = ("name", "uuid", "total_memory", "pci_domain_id", "pci_bus_id", "pci_device_id")


def facts_of_machine(devices: Sequence[torch.device]) -> dict[str, object]:
    """Returns the kernel, the driver, and the GPUs behind the devices, in words and numbers.

    An unknown fact is an empty string.
    """
    facts: dict[str, object] = {name: _text(path) for name, path in _FILES.items()}
    facts |= {"kernel": platform.release(), "cuda": _version_of_driver()}
    return facts | {"gpus": [facts_of_gpu(device) for device in devices]}


def facts_of_gpu(device: torch.device) -> list[str]:
    """Returns the identifying properties of a GPU; for the CPU, its name."""
    if device.type != "cuda":
        return [str(device)]
    properties = torch.cuda.get_device_properties(device)
    return [str(getattr(properties, name, "")) for name in _PROPERTIES]


def _version_of_driver() -> int:
    version = ctypes.c_int(0)
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return 0
    return version.value


def _text(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_... of malloc.h
_MOST_BYTES_KEPT = 2**31 - 1  # all an int holds
_LARGEST_BLOCK_KEPT = 32 * 2**20  # glibc's limit; larger ones always are the system's
_OF_USERS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")


def status_of_process(pid: int) -> dict[str, str]:
    """Returns what Linux tells of a process by field, such as "State": "T (stopped)".

    Raises:
        OSError: FileNotFoundError if the process is gone, or there is no ``/proc``.
    """
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


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


_SOFT = 1  # omp_pause_soft of OpenMP 5.0: drops only what OpenMP can create again


def _ender() -> Callable[[], object] | None:
    """Returns a function that ends the calling thread's team; ``None`` if OpenMP has none."""
    with suppress(AttributeError, OSError, TypeError):
        openmp = ctypes.CDLL(None)  # the one that torch has loaded for all
        if not hasattr(openmp, "__kmpc_fork_call"):  # LLVM's would pause all threads' teams
            pause, host = openmp.omp_pause_resource, openmp.omp_get_initial_device()
            return lambda: pause(_SOFT, host)
    return None


release_thread_pool = _ender()
"""Ends the team of the calling thread, if it has one; ``None`` if OpenMP cannot do that."""
