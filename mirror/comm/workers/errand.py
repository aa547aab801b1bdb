"""Errand: a call that takes as long as others like, in a thread, so that who waits can look up."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Generic, TypeVar

T = TypeVar("T")

TIMED_OUT = "timed out"  # what the errors of works that are not done yet have in their words


class BackgroundCall(Generic[T]):
    """A call that is waited for as the works of torch.distributed are.

    Ctrl-C reaches who waits for it, and no call of torch that waits for other processes.
    """

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self._result: T
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="mirror errand", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result = self._call()
        except BaseException as error:
            self._error = error

    def wait(self, timeout: timedelta) -> T:
        """Returns what the call has returned.

        Raises:
            RuntimeError: it has not returned yet, see ``TIMED_OUT``.
            BaseException: what it has raised.
        """
        self._thread.join(timeout.total_seconds())
        if self._thread.is_alive():
            raise RuntimeError(f"the call {TIMED_OUT}")
        if self._error is not None:
            raise self._error
        return self._result
