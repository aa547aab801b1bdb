"""How long a device works, measured without waiting for it."""

from __future__ import annotations

from collections import deque
from time import perf_counter
from typing import Any

import torch


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
