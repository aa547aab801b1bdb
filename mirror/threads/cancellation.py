"""Cancels a failed run, with the runs inside it, and joins the replicas' threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic
from typing import Any, Protocol

from mirror.threads.merge_point import RunCancelled
from mirror.threads.user_frames import active_calls_of, throw_into_thread

# An exception thrown into a thread is lost if it interrupts a finalizer or a callback: try again.
AGAIN_SECONDS = 0.5


class Cancellable(Protocol):
    """A run of replicas that can be cancelled from outside."""

    def fail(self, failure: BaseException) -> None:
        """Fails the run from outside: no replica continues past the next merge point."""

    def threads(self, *, which_run: bool) -> list[threading.Thread]:
        """Returns the live threads: of all replicas, or of those that have the turn."""


def cancel_and_join(
    run: Cancellable, failure: BaseException, seconds: float, *, inner: Callable[..., Any]
) -> bool:
    """Fails a run, and the runs that its replicas have started, and joins all threads.

    Args:
        failure: the error of the run.
        seconds: how long to wait. Threads that have not ended by then are abandoned.
        inner: the method that callers of such runs are in; it finds the runs inside this one.

    Returns:
        Whether all threads have ended.
    """
    now = monotonic()
    deadline, again = now + seconds, now
    runs: list[Any] = [run]
    threads: set[threading.Thread] = set()
    sent = False
    while True:
        if monotonic() >= again:
            for one in runs:  # grows
                one.fail(failure if one is run else RunCancelled())
                threads.update(one.threads(which_run=False))
                for thread in one.threads(which_run=not sent):
                    if thread is not threading.current_thread():
                        # It may wait for a run inside, and gets no exception until that one ends.
                        runs += (r for r in active_calls_of(thread, inner) if r not in runs)
                        throw_into_thread(thread, RunCancelled)
            sent, again = True, again + AGAIN_SECONDS
        alive = [t for t in threads if t.is_alive() and t is not threading.current_thread()]
        if not alive:
            return True
        now = monotonic()
        if now >= deadline:
            return False
        alive[0].join(min(again, deadline) - now)
