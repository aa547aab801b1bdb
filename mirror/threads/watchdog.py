"""Watchdog: one thread per process aborts calls that exceed their deadline.

A caller only registers its call and the deadline. The thread starts with the first call and ends
after a while without calls.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable
from time import monotonic
from typing import Any

from mirror.base.process_bound import reinit_after_fork
from mirror.errors import CollectiveTimeoutError
from mirror.threads.user_frames import active_calls_of, stacks

# How long an aborted call may take to end before that is logged as an error.
GRACE_SECONDS = 5.0
# How long the thread stays alive after the last call.
IDLE_SECONDS = 1.0

_logger = logging.getLogger("mirror")


class WatchedCall:
    """One call with a deadline.

    Args:
        abort: aborts this call and all calls with the same function; the watchdog's thread
            calls it.
        what: returns the name of the call for the error.

    Attributes:
        late: the error message, once the call has been aborted.
    """

    def __init__(
        self,
        work: Callable[[], Any],
        seconds: float,
        abort: Callable[[], object],
        what: Callable[[], str],
    ) -> None:
        self._work, self.seconds, self.abort, self.what = work, seconds, abort, what
        self.deadline = monotonic() + seconds
        self.late: str | None = None
        self._thread = threading.current_thread()

    def make(self) -> Any:
        """Makes the call.

        Raises:
            CollectiveTimeoutError: the call was aborted, even if it has returned or raised.
        """
        try:
            _watchdog.begin(self)
            result = self._work()
        except Exception as error:
            if self.late is not None:
                raise CollectiveTimeoutError(self.late) from error
            raise
        finally:
            _watchdog.end(self)
        if self.late is not None:
            raise CollectiveTimeoutError(self.late)
        return result

    def is_active(self) -> bool:
        """Whether its thread is still in it; an interrupt may have skipped ``end``."""
        return self in active_calls_of(self._thread, WatchedCall.make)


class _Watchdog:
    def __init__(self) -> None:
        self.after_fork()
        reinit_after_fork(self)

    def after_fork(self) -> None:
        """Resets the state, as in a forked process, which lacks the thread."""
        self._calls: dict[WatchedCall, None] = {}  # changed only by atomic dict operations
        self._lock = threading.Condition()
        self._thread: threading.Thread | None = None
        self._wakes_at = 0.0
        self._num_begun = 0

    def begin(self, call: WatchedCall) -> None:
        self._calls[call] = None
        self._num_begun += 1
        if self._thread is None or call.deadline < self._wakes_at:
            with self._lock:
                self._lock.notify_all()
                if self._thread is None:
                    name = "mirror watchdog"
                    thread = threading.Thread(target=self._watch, name=name, daemon=True)
                    thread.start()  # before it is stored: an interrupt may come in between
                    self._thread = thread

    def end(self, call: WatchedCall) -> None:
        self._calls.pop(call, None)

    def _watch(self) -> None:
        num_seen = -1
        while True:
            self._poll()
            with self._lock:
                if num_seen == self._num_begun:
                    self._thread = None
                    if not self._calls:  # a new call now sees that there is no thread
                        return
                    self._thread = threading.current_thread()
                num_seen = self._num_begun
                self._wakes_at = monotonic() + IDLE_SECONDS
                deadlines = (call.deadline for call in tuple(self._calls))
                self._wakes_at = min(self._wakes_at, *deadlines, math.inf)
                self._lock.wait(max(0.0, self._wakes_at - monotonic()))

    def _poll(self) -> None:
        # A function of its own, so that the waiting frame keeps no call alive.
        for call in tuple(self._calls):
            if call.deadline <= monotonic():
                self._expire(call)

    def _expire(self, call: WatchedCall) -> None:
        if not call.is_active():
            self.end(call)
        elif call.late is None:
            message = (
                f"{call.what()} did not end within timeout_seconds={call.seconds}, and was broken "
                "off; raise the timeout in CommunicationOptions, or find what it waits for:\n"
                f"{stacks()}"
            )
            for other in tuple(self._calls):
                if other.abort == call.abort:
                    other.late, other.deadline = message, monotonic() + GRACE_SECONDS
            try:
                call.abort()
            except Exception:
                _logger.exception("mirror: breaking off %s failed", call.what())
        else:
            self.end(call)
            _logger.error(
                "mirror: %s was broken off, and still goes on %s s later; nothing but the end of "
                "the process ends it. Where the threads are:\n%s",
                call.what(),
                GRACE_SECONDS,
                stacks(),
            )


_watchdog = _Watchdog()
