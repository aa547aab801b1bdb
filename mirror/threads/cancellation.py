"""What becomes of the threads of a run that is over before they are."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic
from typing import Any, Protocol

from mirror.threads.merge_point import RunCancelled
from mirror.threads.user_frames import active_calls_of, throw_into_thread

# An exception sent to a thread may be lost: to a finalizer that it interrupts, or a callback.
AGAIN_SECONDS = 0.5


class Cancellable(Protocol):
    """The replicas' threads, of a run that an exception has struck."""

    def fail(self, failure: BaseException) -> None:
        """Fails the run from outside: no replica goes on past the next merge point."""

    def threads(self, *, which_run: bool) -> list[threading.Thread]:
        """Returns the replicas' threads that live, or those of replicas that have the turn."""


def cancel_and_join(
    run: Cancellable, failure: BaseException, seconds: float, *, inner: Callable[..., Any]
) -> bool:
    """Fails a run, and those that its replicas have started, and waits until all threads ended.

    Args:
        failure: what the run has failed of.
        seconds: how long to wait; who has not ended by then is left to itself.
        inner: the method of such runs that their callers are in.

    Returns:
        Whether all have ended.
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
                        # It may wait for a run that it has started, and hears nothing before that.
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
