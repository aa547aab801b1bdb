"""Helpers shared by the GPU checks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mirror import comm
from mirror.comm import registry
from mirror.devices import synchronize

LATE_CYCLES = 200_000_000
"""Of a kernel that only waits: some 0.1 s."""


class Skipped(Exception):
    """A check cannot be made here; the message is the reason."""


def created(name: str, devices: tuple[torch.device, ...], **options: object) -> comm.Communicator:
    """Makes a communicator.

    Raises:
        Skipped: the backend does not serve the devices, for a reason other than a failed test.
    """
    kind = registry.check_name(name)
    reason = None if kind is None else kind.unavailable_reason(devices)
    if reason is not None:
        raise Skipped(reason)
    return comm.create(name, devices, **options)


def settle(devices: Sequence[torch.device]) -> None:
    for device in dict.fromkeys(devices):
        synchronize(device)
