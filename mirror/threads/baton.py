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


class Baton:
    """Where one thread waits until another one lets it go on."""

    __slots__ = ("_lock", "_moved", "_moving", "_sleeper")

    def __init__(self) -> None:
        self._lock, self._moving = threading.Lock(), threading.Lock()
        self._lock.acquire()
        self._sleeper: int | None = None  # the thread that waits, as the system numbers them
        self._moved: tuple[set[int], set[int]] | None = None  # to where, and from where

    def wait(self, timeout: float = math.inf) -> bool:
        """Waits until the gate is opened and closes it; returns whether it was in time.

        Args:
            timeout: seconds.
        """
        # Not the number that the Thread knows: a forked process's is that of the other process's.
        self._sleeper = threading.get_native_id()
        try:
            return self._lock.acquire(timeout=-1 if timeout == math.inf else timeout)
        finally:
            with self._moving:  # from here on nobody moves this thread
                self._sleeper = None
            if self._moved is not None:
                self.move_back()

    def post(self, *, near: bool) -> None:
        """Lets one thread through.

        Args:
            near: whether it is to go on where the calling thread is. See [Note: Waking up].

        Raises:
            RuntimeError: the gate is open already.
        """
        if near and _current_cpu is not None:
            with self._moving, suppress(OSError):  # the thread has ended
                if self._sleeper is not None:
                    here, allowed = {_current_cpu()}, os.sched_getaffinity(self._sleeper)
                    if here < allowed:
                        self._moved = here, allowed
                        os.sched_setaffinity(self._sleeper, here)
        self._lock.release()

    def move_back(self) -> None:
        """Gives the thread that waits here, which calls, its affinity back; idempotent.

        Unless somebody has set another one.
        """
        if self._moved is not None:
            here, allowed = self._moved
            if os.sched_getaffinity(0) == here:
                os.sched_setaffinity(0, allowed)
            self._moved = None


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
