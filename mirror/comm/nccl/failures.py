"""What is said when NCCL fails, or does not come to an end."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from mirror.comm.nccl.libnccl import version_name
from mirror.errors import BackendError, CollectiveTimeoutError

_ABORTED = (
    "its communicators were aborted, and what was reduced last may be garbage: make another "
    "strategy"
)

# Where GPUs do not reach each other's memory, NCCL has them meet there: some 10 MB a pair and
# channel. Docker gives 64 MB.
_SHARED_MEMORY, _ENOUGH_BYTES = "/dev/shm", 2**29
_SIGNS = ("ncclSystemError", "shared memory", "/shm", "No space left")


def failure_message(
    version: int, what: str, devices: Sequence[torch.device], why: str
) -> BackendError:
    where = ", ".join(map(str, devices))
    return BackendError(
        f"NCCL {version_name(version)} failed at {what} on {where}: {why}{_hint(why)}; {_ABORTED}"
    )


def timeout_message(
    seconds: float, what: str, devices: Sequence[torch.device], state: str
) -> CollectiveTimeoutError:
    where = ", ".join(map(str, devices))
    return CollectiveTimeoutError(
        f"NCCL must be done within {seconds:g} s; {what} on {where} was not: {state}; see what "
        f"the devices were doing, or allow more with timeout_seconds; {_ABORTED}"
    )


def _hint(why: str) -> str:
    """Returns a remedy where memory that processes share is short, and may be the reason."""
    if not any(sign in why for sign in _SIGNS):
        return ""
    try:
        found = os.statvfs(_SHARED_MEMORY)
    except OSError:
        return ""
    size = found.f_blocks * found.f_frsize
    if size >= _ENOUGH_BYTES:
        return ""
    return (
        f"; {_SHARED_MEMORY} has {size >> 20} MiB, in which NCCL joins GPUs that do not reach "
        "each other: give a container more, as by docker run --shm-size=1g"
    )
