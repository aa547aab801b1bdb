"""Events, stream addresses for C libraries, and a stopwatch for devices; none of them waits."""

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
        """Whether the device has reached this point; does not wait."""


class _Past:
    def query(self) -> bool:
        return True


_PAST = _Past()


class _CudaEvent:
    """A torch event, queried through the driver, because torch holds the GIL during a query.

    The driver may wait for a lock of a thread that waits for the GIL: that would be a deadlock.
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
    """Returns an event at the end of the device's current stream; on the CPU it is in the past."""
    if device.type != "cuda":
        return _PAST
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return _CudaEvent(event)


def query_without_breaking_capture() -> None:
    """Lets the calling thread query events while other threads capture a CUDA graph.

    For threads that only watch: the events they query are never captured.
    """
    driver = _driver()
    if driver is not None:
        driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(_RELAXED)))


def stream_address(device: torch.device) -> int:
    """Returns the address of the device's current stream for C libraries; 0 for the CPU.

    CUDA's default stream is 0, too, so the result does not show whether there is a stream.
    """
    if device.type != "cuda":
        return 0
    return torch.cuda.current_stream(device.index).cuda_stream  # by its number it is quicker


def is_stream_idle(device: torch.device, stream: int) -> bool:
    """Whether a stream, given by its address, has certainly finished its work; never waits.

    False for the CPU. Not for streams that may be captured: the query would end the capture.
    """
    driver = _driver()
    if device.type != "cuda" or driver is None:
        return False
    with torch.cuda.device(device):  # 0 is the default stream of the current one
        return bool(driver.cuStreamQuery(ctypes.c_void_p(stream)) == _SUCCESS)


@cache
def _driver() -> ctypes.CDLL | None:
    """Returns CUDA's driver library; ctypes releases the GIL during its calls."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


class Stopwatch:
    """Sums how long a device works between ``start`` and ``stop``, without waiting for it.

    On a GPU it uses events on the calling thread's current stream and counts only finished work;
    on the CPU it uses the clock.
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
