"""How far a device has come, and the stream it works on, for libraries in C."""

from __future__ import annotations

from typing import Protocol

import torch


class Event(Protocol):
    """A point in the work of a device."""

    def query(self) -> bool:
        """Whether the device has come that far; does not wait."""


class _Past:
    def query(self) -> bool:
        return True


_PAST = _Past()


def record_event(device: torch.device) -> Event:
    """Returns the point that the device's current stream now ends at; the CPU is there already."""
    if device.type != "cuda":
        return _PAST
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def stream_address(device: torch.device) -> int:
    """Returns the device's current stream as C libraries take it; 0 for the CPU, which has none.

    That 0 also is CUDA's default stream, so this is no question whether there is a stream.
    """
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
