"""The interface of engines: an engine starts actors, and clients call their methods.

An actor is an object in a process of its own.

::

    with ProcessEngine() as engine:
        actor = engine.start("server 0", "package.module:Shard", {"index": 0})
        header, (values,) = actor.call("pull", {"version": 3}).result()

A role is the dotted path of a class. The actor's process constructs it with ``init``, which is
sent as JSON. A method takes ``(header, buffers)`` and returns the same, or ``None``. Buffers are
NumPy arrays and are never pickled.

Methods run one at a time, in the order in which calls arrive, in one thread (the main thread, if
the actor is a process). If the class has ``concurrent = True``, each call has its own thread.

A method may keep its arguments; they may be read-only. Its result is sent before the next method
runs. So it may return memory that the next method changes, unless the class is concurrent.

``Engine`` and ``OwnedActor`` have what the engines share: starting actors, stopping them, and
noticing that they have ended.
"""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from numpy.typing import NDArray

from mirror.errors import ActorDied, RemoteError, WireError

__all__ = [
    "Actor",
    "ActorClient",
    "ActorDied",
    "Address",
    "Answer",
    "Array",
    "Engine",
    "Future",
    "Header",
    "RemoteError",
    "Sendable",
    "WireError",
]

_DEATH_NOTICE_SECONDS = 1.0

Array = NDArray[Any]
Header = dict[str, Any]
Sendable = Array | memoryview | bytes | bytearray
Address = dict[str, Any]
Answer = tuple[Header, list[Array]]


class Future(Protocol):
    """The pending answer to a call."""

    def result(self, timeout: float | None = None) -> Answer:
        """Waits for the answer, and returns it.

        Args:
            timeout: in seconds; after a timeout, ``result`` may be called again.

        Raises:
            RemoteError: the method raised, or does not exist.
            ActorDied: the actor's process ended before it answered.
            TimeoutError: no answer came within ``timeout``.
        """

    def done(self) -> bool:
        """Returns whether ``result`` would return without waiting."""


class ActorClient(Protocol):
    """Calls an actor. An actor may have many clients, in many processes and threads."""

    name: str
    timeout_seconds: float | None
    """The limit for ``result()`` of a call, after which the actor counts as lost. An owner kills
    its process; calls that are not done raise ActorDied. None waits without a limit."""

    @property
    def address(self) -> Address:
        """The argument of ``connect`` for another client, in any process of the engine; JSON."""

    def call(
        self,
        method: str,
        header: Header | None = None,
        buffers: Sequence[Sendable] = (),
        *,
        into: Sequence[Array] | None = None,
    ) -> Future:
        """Starts a call and returns its future; calls of one thread run in their order.

        The buffers may be changed as soon as this returns.

        Args:
            into: contiguous arrays that receive the answer's buffers, if their dtypes and shapes
                match. Without a match, the answer comes in new arrays.

        Raises:
            WireError: the header is not JSON, or a buffer does not hold plain numbers.
        """

    def close(self) -> None:
        """Closes the connection; the actor keeps running."""


class Actor(ActorClient, Protocol):
    """An actor, as the process that started it sees it."""

    @property
    def alive(self) -> bool:
        """Whether the actor's process runs."""

    def on_death(self, callback: Callable[[], None]) -> None:
        """Calls a function, in a new thread, each time the actor's process ends.

        ``kill`` counts; the engine's ``close`` does not. If the process has ended already, the
        function is called immediately.
        """

    def kill(self) -> None:
        """Kills the process, as SIGKILL does, and waits until it has ended."""

    def restart(self) -> None:
        """Kills the process and starts the actor again in a new one, at the same address."""

    def stop(self) -> None:
        """Ends the process; the actor cannot be restarted."""


if TYPE_CHECKING:
    from typing_extensions import Self


ActorT = TypeVar("ActorT", bound=Actor)


class Engine(ABC, Generic[ActorT]):
    """Starts actors and stops them; it has a list of those that it started."""

    def __init__(self) -> None:
        self._actors: list[ActorT] = []
        self._is_closed = False

    @abstractmethod
    def _make(self, name: str, role: str, init: Header) -> ActorT:
        """Returns an actor that has not been started yet."""

    @abstractmethod
    def close(self) -> None:
        """Stops all actors."""

    def start(self, name: str, role: str, init: Header) -> ActorT:
        """Starts an actor, and returns when it is ready.

        Args:
            name: used in messages, and printed before each line of the actor's output.
            role: "package.module:Class".
            init: the constructor's keyword arguments; small, and JSON.

        Raises:
            RemoteError: the role does not exist, or its constructor raised.
        """
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


class OwnedActor:
    """What the actors of all engines have in common, as the process that started them sees it."""

    _liveness: Liveness

    @property
    def alive(self) -> bool:
        """See ``Actor``."""
        return self._liveness.is_alive

    def on_death(self, callback: Callable[[], None]) -> None:
        """See ``Actor``."""
        self._liveness.on_death(callback)

    def kill(self) -> None:
        """See ``Actor``."""
        raise NotImplementedError

    def confirm_death(self) -> None:
        """Waits until the engine has noticed the end that a connection noticed."""
        self._liveness.wait(_DEATH_NOTICE_SECONDS)

    def end_stalled(self) -> None:
        """Kills the process: a call has taken ``timeout_seconds``."""
        self.kill()


def run_in_threads(functions: list[Callable[[], None]]) -> None:
    """Calls each function in a new thread, and returns immediately."""
    for function in functions:
        threading.Thread(target=function, daemon=True).start()
