"""Teams: the threads of OpenMP, which a CPU's larger operations are divided among.

[Note: Teams]
OpenMP keeps a team for every thread that has computed with several. The team of a replica that
waits for its turn has nothing to do, but it counts: when there are more threads than CPUs, GNU's
OpenMP lets none of them look out for work, so that each operation of the team that computes wakes
its members from their sleep, tens of microseconds each. A step of many middle-sized operations
takes up to twice as long. So who gives the turn away may end its team, which takes 1 us where
there is none, and some 50 to end one and 50 to have it again: what pays is measured, see
[Note: Measured manners] in ``threads/policies.py``. Bits do not depend on it: an
operation is divided by the number of threads, not by who they are.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import suppress

_SOFT = 1  # omp_pause_soft of OpenMP 5.0: keeps all but what can be had again


def _ender() -> Callable[[], object] | None:
    """Returns what ends the calling thread's team; ``None`` where OpenMP cannot."""
    with suppress(AttributeError, OSError, TypeError):
        openmp = ctypes.CDLL(None)  # the one that torch has loaded for all
        if not hasattr(openmp, "__kmpc_fork_call"):  # LLVM's would pause all threads' teams
            pause, host = openmp.omp_pause_resource, openmp.omp_get_initial_device()
            return lambda: pause(_SOFT, host)
    return None


release_thread_pool = _ender()
"""Ends the team of the calling thread, if it has one; ``None`` where OpenMP cannot."""
