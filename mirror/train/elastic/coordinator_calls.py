"""Calls to a coordinator elsewhere, which may never answer.

A coordinator that was killed closes its connections, and calls of its store raise RuntimeError. A
machine that was lost, or a process that was stopped, closes nothing: a call of a ``TCPStore`` then
waits forever; the store's timeout has no effect.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic
from typing import TypeVar

T = TypeVar("T")

SILENCE_SECONDS = 60.0
"""How long a coordinator may be silent: it may be stopped, or its machine be very busy."""

_AWAKE_SECONDS = 1.0
_POLL_SECONDS = 0.05


class SilenceTimer:
    """Measures how long a coordinator has been silent while this process was awake.

    A longer time between two looks is a pause of this process, which was stopped itself.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self.restart()

    def restart(self) -> None:
        """Starts to measure: the coordinator has answered."""
        self._seconds, self._looked_at = 0.0, self._clock()

    def is_over(self) -> bool:
        """Returns whether the silence is longer than ``SILENCE_SECONDS``."""
        now = self._clock()
        self._seconds += min(now - self._looked_at, _AWAKE_SECONDS)
        self._looked_at = now
        return self._seconds > SILENCE_SECONDS


def silence_text() -> str:
    """Returns the reason for giving up."""
    return f"it has not answered for {SILENCE_SECONDS:g} s"


def call_or_give_up(call: Callable[[], T], is_interrupted: Callable[[], bool]) -> T | None:
    """Calls a coordinator's store, in a thread of its own.

    Returns:
        The result of the call; None once ``is_interrupted()`` is true.

    Raises:
        RuntimeError: the coordinator is gone.
        TimeoutError: the coordinator is silent.
    """
    outcome: list[tuple[T | None, RuntimeError | None]] = []
    is_done = threading.Event()

    def answer() -> None:
        try:
            outcome.append((call(), None))
        except RuntimeError as error:
            outcome.append((None, error))
        is_done.set()

    threading.Thread(target=answer, name="call of the coordinator", daemon=True).start()
    timer = SilenceTimer()
    while not is_done.wait(_POLL_SECONDS):
        if is_interrupted():
            return None
        if timer.is_over():
            raise TimeoutError(silence_text())
    result, error = outcome[0]
    if error is not None:
        raise error
    return result
