"""A callback for every call, by sys.setprofile; the previous profiler is restored afterwards."""

import sys
import threading
from contextlib import contextmanager


@contextmanager
def profiled(callback, *, threads=False):
    """Calls ``callback(frame, event, argument)`` inside; on threads that start there if asked."""
    before, before_of_threads = sys.getprofile(), threading.getprofile()
    if threads:
        threading.setprofile(callback)
    sys.setprofile(callback)
    try:
        yield
    finally:
        sys.setprofile(None)
        if threads:
            threading.setprofile(before_of_threads)
        if hasattr(before, "enable"):  # cProfile's profiler is no function
            before.enable()
        else:
            sys.setprofile(before)
