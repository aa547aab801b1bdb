"""OpenMP teams: the worker threads among which large CPU operations are divided.

[Note: Teams]
Problem: OpenMP keeps a team for every thread that has run a parallel region, also for replicas
that wait for their turn. With more threads than CPUs, members of GNU OpenMP teams sleep instead
of spinning, so each operation wakes them, at tens of microseconds each. A step of many
medium-sized operations takes up to twice as long.
Rule: a thread that passes its turn on may end its team. That takes 1 us without a team, 50 us
with one, and 50 us to create it again; so it is measured, [Note: Measured manners] in
``threads/policies.py``.
Consequence: results have the same bits, which depend only on the number of threads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import suppress

_SOFT = 1  # omp_pause_soft of OpenMP 5.0: drops only what OpenMP can create again


def _ender() -> Callable[[], object] | None:
    """Returns a function that ends the calling thread's team; ``None`` if OpenMP has none."""
    with suppress(AttributeError, OSError, TypeError):
        openmp = ctypes.CDLL(None)  # the one that torch has loaded for all
        if not hasattr(openmp, "__kmpc_fork_call"):  # LLVM's would pause all threads' teams
            pause, host = openmp.omp_pause_resource, openmp.omp_get_initial_device()
            return lambda: pause(_SOFT, host)
    return None


release_thread_pool = _ender()
"""Ends the team of the calling thread, if it has one; ``None`` if OpenMP cannot do that."""
