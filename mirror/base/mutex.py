"""Mutex: a lock that a thread never keeps when Ctrl-C, or another exception, hits it.

Problem: CPython 3.14 may raise KeyboardInterrupt between ``__enter__`` of a lock and the body of
its ``with`` statement, so that the lock stays held forever (python/cpython#148874).
Rule: a lock that outlives a run is taken inside ``try``, and released by the thread that owns it.
Where calls count, it is an RLock in a ``with`` statement, and the handler of the exception calls
``release_if_owned``.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Mutex:
    """Calls functions one at a time; a function may call another one under the same mutex.

    Attributes:
        lock: for code that cannot afford a call, and acquires and releases it as ``call`` does.
    """

    __slots__ = ("lock",)

    def __init__(self) -> None:
        self.lock = threading.RLock()

    def call(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Returns ``fn(*args, **kwargs)``, called while no other thread is in such a call."""
        try:
            self.lock.acquire()
            return fn(*args, **kwargs)
        finally:
            # Not contextlib.suppress: an exception may come between the calls of that.
            try:  # noqa: SIM105
                self.lock.release()
            except RuntimeError:  # the exception came before this thread had the lock
                pass


def release_if_owned(lock: threading.RLock) -> None:
    """Releases a lock that this thread still holds after the ``with`` statement."""
    try:  # noqa: SIM105
        lock.release()
    except RuntimeError:  # it has released it, as it should
        pass


collecting = threading.RLock()  # held while a thread has turned off the collector


def call_without_collection(fn: Callable[[], T]) -> T:
    """Returns ``fn()``; no garbage is collected meanwhile, and no other thread is in such a call.

    For functions in C that hold a lock of their own while they create objects.
    """
    try:
        collecting.acquire()
        collects = gc.isenabled()
        try:
            if collects:
                gc.disable()  # inside: Ctrl-C may hit right after it
            return fn()
        finally:
            if collects:
                gc.enable()
    finally:
        try:  # noqa: SIM105
            collecting.release()
        except RuntimeError:
            pass
