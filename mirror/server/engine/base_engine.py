"""What the engines share: starting actors, stopping them, and noticing that they have ended."""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from mirror.server.engine.engine_types import Header, WireError

if TYPE_CHECKING:
    from typing_extensions import Self


class Startable(Protocol):
    """An actor that has not been started yet."""

    def restart(self) -> None:
        """See ``Actor``."""

    def stop(self) -> None:
        """Ends the actor's process; the actor cannot be restarted."""


StartableT = TypeVar("StartableT", bound=Startable)


class BaseEngine(ABC, Generic[StartableT]):
    """An engine with a list of the actors that it started."""

    def __init__(self) -> None:
        self._actors: list[StartableT] = []
        self._is_closed = False

    @abstractmethod
    def _make(self, name: str, role: str, init: Header) -> StartableT:
        """Returns an actor that has not been started yet."""

    @abstractmethod
    def close(self) -> None:
        """See ``Engine``."""

    def start(self, name: str, role: str, init: Header) -> StartableT:
        """See ``Engine``."""
        if self._is_closed:
            raise WireError("this engine is closed; make another")
        actor = self._make(name, role, init)
        self._actors.append(actor)
        try:
            actor.restart()
        except BaseException:
            with contextlib.suppress(ValueError):  # close() may have removed it
                self._actors.remove(actor)
            actor.stop()
            raise
        return actor

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class Liveness:
    """Whether an actor's process runs, and which functions are called when it ends.

    A restarted actor has several processes, one after the other. So each process has an
    identity, the ``process`` arguments: its number, or any other object.
    """

    def __init__(self) -> None:
        self.closed = threading.Event()
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], None]] = []
        self._ended = threading.Event()
        self._ended.set()
        self._process: object = None

    @property
    def is_alive(self) -> bool:
        """Whether the current process runs."""
        return not self._ended.is_set()

    def begin(self, process: object) -> None:
        """Records that a process is ready."""
        with self._lock:
            self._process = process
            self._ended.clear()

    def end(self, process: object) -> list[Callable[[], None]]:
        """Records that a process has ended, and returns the functions to be called.

        The list is empty if the end is recorded already, if the actor has a newer process, or
        after ``close``.
        """
        with self._lock:
            if process != self._process or self._ended.is_set():
                return []
            self._ended.set()
            return [] if self.closed.is_set() else list(self._callbacks)

    def on_death(self, callback: Callable[[], None]) -> None:
        """See ``Actor``."""
        with self._lock:
            self._callbacks.append(callback)
            has_ended = self._process is not None and not self.is_alive
        if has_ended and not self.closed.is_set():
            run_in_threads([callback])

    def wait(self, timeout: float | None = None) -> None:
        """Waits until the current process has ended, for ``timeout`` seconds at most."""
        self._ended.wait(timeout)

    def check_open(self, name: str) -> None:
        """Raises WireError if the engine is closed."""
        if self.closed.is_set():
            raise WireError(f"{name}: its engine is closed")


def run_in_threads(functions: list[Callable[[], None]]) -> None:
    """Calls each function in a new thread, and returns immediately."""
    for function in functions:
        threading.Thread(target=function, daemon=True).start()
