"""A look at every call: sys.setprofile, with what was there before put back, cProfile's, too."""

import sys
import threading
from contextlib import contextmanager


@contextmanager
def profiled(note, *, threads=False):
    """Has ``note(frame, event, argument)`` called inside, on threads that start there if asked."""
    before, before_of_threads = sys.getprofile(), threading.getprofile()
    if threads:
        threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)
        if threads:
            threading.setprofile(before_of_threads)
        if hasattr(before, "enable"):  # cProfile's, which is no function that could be set
            before.enable()
        else:
            sys.setprofile(before)
