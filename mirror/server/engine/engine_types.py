"""What an engine is: it starts actors, objects in processes of their own, which are called.

::

    with ProcessEngine() as engine:
        actor = engine.start("server 0", "package.module:Shard", {"index": 0})
        header, (values,) = actor.call("pull", {"version": 3}).result()

A role is the dotted path of a class. It is made in the actor's process with ``init``, which goes
there as JSON; methods get ``(header, buffers)`` and return the same or ``None``. Buffers are numpy
arrays, never pickled. Methods run one at a time, in one thread (of a process: the main one), in
the order in which calls arrive, unless the class says ``concurrent = True``: then each call has a
thread.

What a method gets is its own to keep, but may be read-only. What it returns is on its way before
the next method begins, so it may return what another will change, unless the class is concurrent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Protocol

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

Array = NDArray[Any]
Header = dict[str, Any]
Sendable = Array | memoryview | bytes | bytearray
Address = dict[str, Any]
Answer = tuple[Header, list[Array]]


class Future(Protocol):
    """An answer that is to come."""

    def result(self, timeout: float | None = None) -> Answer:
        """Waits for what the method has returned.

        Args:
            timeout: in seconds; the answer may still be waited for again afterwards.

        Raises:
            RemoteError: the method has raised, or there is none.
            ActorDied: the actor's process has ended before it answered.
            TimeoutError: it has not answered yet.
        """

    def done(self) -> bool:
        """Returns whether ``result`` would not wait."""


class ActorClient(Protocol):
    """Calls an actor; of one actor there may be many, in many processes and threads."""

    name: str

    @property
    def address(self) -> Address:
        """What ``connect`` needs to make another client, in any process of the engine; JSON."""

    def call(
        self,
        method: str,
        header: Header | None = None,
        buffers: Sequence[Sendable] = (),
        *,
        into: Sequence[Array] | None = None,
    ) -> Future:
        """Begins a call; calls of one thread run in their order.

        The buffers may be changed again when this returns.

        Args:
            into: where the answer's buffers are to be, if they have these dtypes and shapes;
                contiguous. Others come in arrays of their own, as all do without.

        Raises:
            WireError: the header is no JSON, or a buffer is none of plain numbers.
        """

    def close(self) -> None:
        """Ends the connection; the actor lives on."""


class Actor(ActorClient, Protocol):
    """Who has started an actor holds this."""

    @property
    def alive(self) -> bool:
        """Whether its process runs."""

    def on_death(self, callback: Callable[[], None]) -> None:
        """Has a function called, in a thread of its own, each time that its process ends.

        That is every end but by the engine's ``close``, by ``kill`` too; at once if it has ended.
        """

    def kill(self) -> None:
        """Ends the process, as SIGKILL does; returns when it has ended."""

    def restart(self) -> None:
        """Makes the actor anew in a fresh process, at the same address; ends the old one."""


class Engine(Protocol):
    """Starts actors, and ends them."""

    def start(self, name: str, role: str, init: Header) -> Actor:
        """Starts an actor and waits until it stands.

        Args:
            name: for messages, and before each line that it prints.
            role: "package.module:Class".
            init: the constructor's keyword arguments; small, and JSON.

        Raises:
            RemoteError: the role does not exist, or its constructor has raised.
        """

    def close(self) -> None:
        """Ends all actors."""

    def __enter__(self) -> Engine:
        """Returns the engine, which ``with`` closes."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Ends all actors."""
