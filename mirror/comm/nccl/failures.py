"""What is said when NCCL fails, or does not come to an end."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mirror.comm.nccl.libnccl import version_name
from mirror.errors import BackendError, CollectiveTimeoutError

_ABORTED = (
    "its communicators were aborted, and what was reduced last may be garbage: make another "
    "strategy"
)


def failed(version: int, what: str, devices: Sequence[torch.device], why: str) -> BackendError:
    where = ", ".join(map(str, devices))
    return BackendError(
        f"NCCL {version_name(version)} failed at {what} on {where}: {why}; {_ABORTED}"
    )


def timed_out(
    seconds: float, what: str, devices: Sequence[torch.device], state: str
) -> CollectiveTimeoutError:
    where = ", ".join(map(str, devices))
    return CollectiveTimeoutError(
        f"NCCL must be done within {seconds:g} s; {what} on {where} was not: {state}; see what "
        f"the devices were doing, or allow more with timeout_seconds; {_ABORTED}"
    )
