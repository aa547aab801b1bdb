"""The gates at which replicas wait for their turn, and where they wake up.

[Note: Waking up]
A sleeping thread is woken on an idle CPU, which takes 20 us and more to get going, and finds cold
caches there. Taking turns needs one CPU only, so under ``"lockstep"`` a replica waits with its
affinity set to the caller's CPU and gets its own back when it is woken: a turn costs 6 us instead
of 27. What it computes, and the workers it starts, may use every CPU as before.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable


def closed_gate() -> threading.Lock:
    """Returns a lock that is held: whoever acquires it waits until it is released."""
    gate = threading.Lock()
    gate.acquire()
    return gate


def wait_near(gate: threading.Lock, cpu: int | None) -> None:
    """Waits at a gate, to wake up on one CPU. See [Note: Waking up]."""
    if cpu is None:
        gate.acquire()
        return
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {cpu} & allowed or allowed)
    try:
        gate.acquire()
    finally:
        os.sched_setaffinity(0, allowed)


def _cpu_finder() -> Callable[[], int | None]:
    """Returns libc's ``sched_getcpu``; where there is none, nothing is known."""
    if not hasattr(os, "sched_setaffinity"):
        return lambda: None
    try:
        find: Callable[[], int] = ctypes.PyDLL(None).sched_getcpu
    except (AttributeError, OSError):
        return lambda: None
    return find


current_cpu = _cpu_finder()
