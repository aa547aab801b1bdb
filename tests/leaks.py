"""The threads and processes that a test has started and that still run.

Threads and processes of other tests do not count: those of a dropped strategy or loader end when
garbage is collected, which may be in any later test.
"""

import multiprocessing
import threading


class Leaks:
    """Threads and processes that have started since this object was created."""

    def __init__(self):
        self._before = {*threading.enumerate(), *multiprocessing.active_children()}

    def threads(self, name="mirror "):
        """Returns the living threads with this text in their names."""
        living = threading.enumerate()
        return [thread for thread in living if name in thread.name and thread not in self._before]

    def processes(self):
        """Returns the living processes of multiprocessing."""
        return [one for one in multiprocessing.active_children() if one not in self._before]
