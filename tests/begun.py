"""What a test has begun and what still goes on: others' threads and processes are not looked at.

Those of a strategy or a loader that another test has dropped end when garbage is collected, which
may be at any time, and in any test.
"""

import multiprocessing
import threading


class Begun:
    """Threads and processes that have begun since it was made."""

    def __init__(self):
        self._before = {*threading.enumerate(), *multiprocessing.active_children()}

    def threads(self, name="mirror "):
        """Returns those that live and have this in their names."""
        living = threading.enumerate()
        return [thread for thread in living if name in thread.name and thread not in self._before]

    def processes(self):
        """Returns those of multiprocessing that live."""
        return [one for one in multiprocessing.active_children() if one not in self._before]
