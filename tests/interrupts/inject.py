"""Raises an exception at the k-th entry or return of a function in one thread."""

import sys
import threading
from collections import Counter

MAIN = "main"
EVENTS = ("call", "return", "c_return")  # where Python, between instructions, looks for signals


class Injector:
    """Counts the entries and returns of functions by thread, and raises at one of them.

    Where a function in C has returned, too: there Python runs the handlers of signals.

    Attributes:
        counts: of the last stretch that was watched, by thread: ``"main"``, or its name.
        where: the function and the event at which it has raised; ``None`` if it has not.
    """

    def __init__(self):
        self.counts = Counter()
        self.where = self._target = self._error = None
        self._is_watching = False
        threading.setprofile(self._record)  # of threads that start from now on
        self.install()

    def install(self):
        """Has the calling thread watched, which ends when it raises there."""
        sys.setprofile(self._record)

    def watch(self, target=None, error=None):
        """Begins to count, and to look for the k-th event of a thread."""
        self.counts, self.where = Counter(), None
        self._target, self._error = target, error
        self._is_watching = True

    def stop(self):
        """Ends that."""
        self._is_watching = False

    def _record(self, frame, event, arg):
        if not self._is_watching or event not in EVENTS or frame.f_code in _OWN:
            return
        thread = threading.current_thread()
        name = MAIN if thread is threading.main_thread() else thread.name
        self.counts[name] += 1
        if self._target == (name, self.counts[name]):
            error, self._target = self._error, None
            of = f" of {arg.__name__}" if event == "c_return" else ""
            code = frame.f_code
            self.where = f"{event}{of} at {code.co_filename}:{frame.f_lineno} {code.co_name}"
            raise error


_OWN = {Injector.watch.__code__, Injector.stop.__code__}
