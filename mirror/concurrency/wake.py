"""The gates at which replicas wait for their turn, and where they wake up.

[Note: Waking up]
A sleeping thread is woken on an idle CPU, which takes 20 us and more to get going, and finds cold
caches there: a step of small operations takes half as long again. Taking turns needs one CPU only,
so who gives the turn away, and is about to sleep, moves the one that gets it to the CPU it runs on
itself. That thread takes its own affinity back when it goes on: what it computes, and the workers
it starts, may use every CPU as before.
"""

from __future__ import annotations

import ctypes
import math
import os
import threading
from collections.abc import Callable
from contextlib import suppress


class Gate:
    """Where one thread waits until another one lets it go on."""

    __slots__ = ("_lock", "_sleeper")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self._sleeper: tuple[int, set[int]] | None = None  # the thread, and its affinity

    def wait(self, timeout: float = math.inf) -> bool:
        """Waits until the gate is opened and closes it; returns whether it was in time.

        Args:
            timeout: seconds.
        """
        timeout = -1 if timeout == math.inf else timeout
        if _current_cpu is None:
            return self._lock.acquire(timeout=timeout)
        allowed = os.sched_getaffinity(0)
        self._sleeper = threading.get_native_id(), allowed
        try:
            return self._lock.acquire(timeout=timeout)
        finally:
            self._sleeper = None
            os.sched_setaffinity(0, allowed)

    def open(self, *, near: bool) -> None:
        """Lets one thread through.

        Args:
            near: whether it is to go on where the calling thread is. See [Note: Waking up].

        Raises:
            RuntimeError: the gate is open already.
        """
        sleeper = self._sleeper if near else None
        if sleeper is not None and _current_cpu is not None:
            cpu = _current_cpu()
            if cpu in sleeper[1]:
                with suppress(OSError):  # the thread has ended
                    os.sched_setaffinity(sleeper[0], {cpu})
        self._lock.release()


def _cpu_finder() -> Callable[[], int] | None:
    """Returns libc's ``sched_getcpu``; ``None`` where there is none."""
    if not hasattr(os, "sched_setaffinity"):
        return None
    try:
        find: Callable[[], int] = ctypes.PyDLL(None).sched_getcpu
    except (AttributeError, OSError):
        return None
    return find


_current_cpu = _cpu_finder()
