"""Baton: a thread waits on it for its turn, and another thread posts it.

[Note: Waking up]
Problem: the kernel wakes a sleeping thread on an idle CPU. That CPU takes 20 us or more to start
and has cold caches, so a step of small operations takes 1.5 times as long.
Rule: turns need only one CPU. A thread that passes its turn on, and is about to sleep, sets the
affinity of the next thread to its own CPU.
Consequence: the woken thread restores its affinity before it continues. Its computations, and the
threads it starts, may use every CPU as before.
"""

from __future__ import annotations

import ctypes
import math
import os
import threading
from collections.abc import Callable
from contextlib import suppress

# A signal that arrives just before a thread sleeps does not wake it. That moment lasts up to a
# second without the GIL on a busy machine. So the caller of a run, which may be the main thread,
# wakes up this often: Python then handles the signal.
SIGNAL_SECONDS = 0.5


class Baton:
    """Blocks one thread until another thread posts.

    Args:
        is_of_caller: whether the thread that waits may be the main thread, which handles signals.
    """

    __slots__ = ("_affinities", "_lock", "_longest", "_pinning", "_sleeper")

    def __init__(self, *, is_of_caller: bool = False) -> None:
        self._longest = SIGNAL_SECONDS if is_of_caller else -1.0  # seconds of one sleep
        self._lock, self._pinning = threading.Lock(), threading.Lock()
        self._lock.acquire()
        self._sleeper: int | None = None  # the native id of the waiting thread
        self._affinities: tuple[set[int], set[int]] | None = None  # pinned, original

    def wait(self, timeout: float = math.inf) -> bool:
        """Waits for a ``post`` and consumes it; returns whether it came within the timeout.

        Args:
            timeout: seconds.
        """
        # Not Thread.native_id: after a fork it still names the thread of the parent process.
        self._sleeper = threading.get_native_id()
        try:
            if timeout != math.inf:
                return self._lock.acquire(timeout=timeout)
            while not self._lock.acquire(timeout=self._longest):
                pass
            return True
        finally:
            with self._pinning:  # from here on no other thread changes this thread's affinity
                self._sleeper = None
            if self._affinities is not None:
                self.move_back()

    def post(self, *, near: bool) -> None:
        """Lets one thread continue.

        Args:
            near: whether it continues on the CPU of the calling thread. See [Note: Waking up].

        Raises:
            RuntimeError: the baton is posted already.
        """
        if near and _current_cpu is not None:
            with self._pinning, suppress(OSError):  # the thread has ended
                if self._sleeper is not None:
                    own_cpu, allowed = {_current_cpu()}, os.sched_getaffinity(self._sleeper)
                    if own_cpu < allowed:
                        self._affinities = own_cpu, allowed
                        os.sched_setaffinity(self._sleeper, own_cpu)
        self._lock.release()

    def move_back(self) -> None:
        """Restores the affinity of the calling thread, which is the one that waits; idempotent.

        An affinity that the program has set in the meantime stays.
        """
        if self._affinities is not None:
            pinned, allowed = self._affinities
            if os.sched_getaffinity(0) == pinned:
                os.sched_setaffinity(0, allowed)
            self._affinities = None


def _cpu_finder() -> Callable[[], int] | None:
    """Returns libc's ``sched_getcpu``, or ``None`` if the platform has none."""
    if not hasattr(os, "sched_setaffinity"):
        return None
    try:
        find: Callable[[], int] = ctypes.PyDLL(None).sched_getcpu
    except (AttributeError, OSError):
        return None
    return find


_current_cpu = _cpu_finder()
