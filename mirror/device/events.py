"""How far a device has come, and the stream it works on, for libraries in C.

How long a device works, measured without waiting for it.
"""

from __future__ import annotations

import ctypes
from collections import deque
from functools import cache
from time import perf_counter
from typing import Any, Protocol

import torch

# CUresult and CUstreamCaptureMode of cuda.h.
_SUCCESS, _NOT_READY, _RELAXED = 0, 600, 2


class Event(Protocol):
    """A point in the work of a device."""

    def query(self) -> bool:
        """Whether the device has come that far; does not wait."""


class _Past:
    def query(self) -> bool:
        return True


_PAST = _Past()


class _CudaEvent:
    """Torch's event, asked through the driver: torch keeps the GIL while it asks.

    Where the driver has to wait for a lock, that of a thread that waits for the GIL in the end, no
    Python would run again.
    """

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def query(self) -> bool:
        driver = _driver()
        if driver is None:
            return bool(self._event.query())
        status = driver.cuEventQuery(ctypes.c_void_p(self._event.cuda_event))
        if status not in (_SUCCESS, _NOT_READY):
            raise RuntimeError(f"CUDA error {status} of work that had been enqueued")
        return bool(status == _SUCCESS)


def record_event(device: torch.device) -> Event:
    """Returns the point that the device's current stream now ends at; the CPU is there already."""
    if device.type != "cuda":
        return _PAST
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return _CudaEvent(event)


def query_without_breaking_capture() -> None:
    """Has the calling thread's questions be no error of a CUDA graph that others capture.

    For threads that only watch: what they ask about was never captured.
    """
    driver = _driver()
    if driver is not None:
        driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(_RELAXED)))


def stream_address(device: torch.device) -> int:
    """Returns the device's current stream as C libraries take it; 0 for the CPU, which has none.

    That 0 also is CUDA's default stream, so this is no question whether there is a stream.
    """
    if device.type != "cuda":
        return 0
    return torch.cuda.current_stream(device.index).cuda_stream  # by its number it is quicker


def is_stream_idle(device: torch.device, stream: int) -> bool:
    """Whether a stream, by its address, is known to have done all its work; never waits.

    Nothing is known of the CPU. Not for streams that may be captured: the question ends that.
    """
    driver = _driver()
    if device.type != "cuda" or driver is None:
        return False
    with torch.cuda.device(device):  # 0 is the default stream of the current one
        return bool(driver.cuStreamQuery(ctypes.c_void_p(stream)) == _SUCCESS)


@cache
def _driver() -> ctypes.CDLL | None:
    """Returns CUDA's driver, whose calls let go of the GIL."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


class Stopwatch:
    """Adds up how long a device works between ``start`` and ``stop``, without waiting for it.

    On a GPU by events on the calling thread's current stream; what the GPU has not finished is
    not counted yet. On the CPU by the clock.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._started: Any = None
        self._pending: deque[tuple[Any, Any]] = deque()
        self._seconds = 0.0

    def start(self) -> None:
        """Begins an interval."""
        self._started = self._now()

    def stop(self) -> None:
        """Ends the interval, if one has begun."""
        started, self._started = self._started, None
        if started is not None:
            self._pending.append((started, self._now()))

    def seconds(self) -> float:
        """Returns the sum of the intervals that are over."""
        while self._pending:
            start, stop = self._pending[0]
            if self._device.type != "cuda":
                self._seconds += stop - start
            elif stop.query():
                self._seconds += start.elapsed_time(stop) / 1000
            else:
                break
            self._pending.popleft()
        return self._seconds

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event
