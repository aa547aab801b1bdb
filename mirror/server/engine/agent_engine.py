"""The engine of given addresses: its actors take seats that were started there by hand."""

from __future__ import annotations

import contextlib
import logging
import queue
import secrets
import socket
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from time import monotonic
from typing import Any

from mirror.server.engine.actor_process import receive_words, send_words
from mirror.server.engine.base_engine import BaseEngine
from mirror.server.engine.connection import Reply, remote_error
from mirror.server.engine.engine_types import (
    ActorDied,
    Address,
    Array,
    Header,
    Sendable,
    WireError,
)
from mirror.server.engine.handshake import ACTOR_SECONDS, SEAT, authenticate, notice_silence
from mirror.server.engine.socket_client import SocketClient, register_key

_NEWS_SECONDS = 1.0
_AGAIN_SECONDS = 0.2
_TOLD_SECONDS = 10.0  # after which who waits for a seat says so

_Answers = queue.SimpleQueue["dict[str, Any] | None"]

_logger = logging.getLogger("mirror")


class AgentEngine(BaseEngine["AgentActor"]):
    """Starts actors where a ``Seat`` listens for each.

    Args:
        addresses: host and port by the actor's name.
        key: what the seats have, too.
        timeout_seconds: how long an actor's seat may be away, or somebody else's.
    """

    def __init__(
        self,
        addresses: Mapping[str, tuple[str, int]],
        key: bytes,
        timeout_seconds: float = 600.0,
    ) -> None:
        super().__init__()
        self.id = secrets.token_hex(8)
        self._addresses, self._key, self._timeout = dict(addresses), key, timeout_seconds
        self._ends = weakref.finalize(self, _end_all, self._actors)
        register_key(self.id, key)

    def _make(self, name: str, role: str, init: Header) -> AgentActor:
        if name not in self._addresses:
            raise WireError(f"there is no seat for {name}; there are {', '.join(self._addresses)}")
        host, port = self._addresses[name]
        address = {"engine": "process", "id": self.id, "name": name, "host": host, "port": port}
        return AgentActor(address, self._key, {"role": role, "init": init}, self._timeout)

    def close(self) -> None:
        """See ``Engine``; the seats are free then."""
        self._is_closed = True
        self._ends()


def _end_all(actors: list[AgentActor]) -> None:
    for actor in actors:
        actor.end()
    actors.clear()


class AgentActor:
    """An actor on a seat, as who has started it holds it."""

    def __init__(
        self, address: Address, key: bytes, asked: dict[str, Any], timeout_seconds: float
    ) -> None:
        self.name: str = address["name"]
        self._where = address["host"], address["port"]
        self._key, self._timeout = key, timeout_seconds
        self._asked = {"name": self.name, "id": address["id"], **asked}
        self._client = SocketClient(address, self._confirm)
        self._tether: socket.socket | None = None
        self._answers: _Answers = queue.SimpleQueue()  # of this tether
        self._callbacks: list[Callable[[], None]] = []
        self._lock, self._news = threading.RLock(), threading.Lock()
        self._pid = self._ended_pid = 0
        self._died, self._is_ended = threading.Event(), threading.Event()
        self._died.set()

    @property
    def address(self) -> Address:
        """See ``Client``."""
        return self._client.address

    @property
    def alive(self) -> bool:
        """See ``Actor``."""
        return not self._died.is_set()

    def call(
        self,
        method: str,
        header: Header | None = None,
        buffers: Sequence[Sendable] = (),
        *,
        into: Sequence[Array] | None = None,
    ) -> Reply:
        """See ``Client``."""
        return self._client.call(method, header, buffers, into=into)

    def close(self) -> None:
        """See ``Client``."""
        self._client.close()

    def on_death(self, callback: Callable[[], None]) -> None:
        """See ``Actor``."""
        with self._news:
            self._callbacks.append(callback)
            if self._pid and not self.alive and not self._is_ended.is_set():
                threading.Thread(target=callback, daemon=True).start()

    def kill(self) -> None:
        """See ``Actor``."""
        tether = self._tether
        if self.alive and tether is not None:
            with contextlib.suppress(OSError):  # then the seat is gone, and the actor with it
                send_words(tether, {"kill": self._pid})
            self._died.wait()

    def restart(self) -> None:
        """See ``Actor``; waits until somebody serves at the address."""
        with self._lock:
            self.kill()
            self._client.disconnect(ActorDied(self.name))
            deadline = monotonic() + self._timeout
            answer = None
            while answer is None:
                self._check_open()
                answer = self._asked_there(deadline)
            if "failed" in answer:
                pickled = [bytes.fromhex(text) for text in answer["pickle"]]
                raise remote_error(answer["failed"], pickled)
            if "died" in answer:
                raise ActorDied(self.name, answer["died"].removeprefix(f"{self.name}: "))
            with self._news:
                self._pid = answer["standing"]
                self._died.clear()
            if self._pid == self._ended_pid or self._tether is None:
                self._note_end(self._pid)

    def end(self) -> None:
        """Ends it for good."""
        self._is_ended.set()
        tether = self._tether
        if tether is not None:
            with contextlib.suppress(OSError):
                tether.shutdown(socket.SHUT_RDWR)
        self._client.disconnect(ActorDied(self.name))
        self._died.set()

    def _check_open(self) -> None:
        if self._is_ended.is_set():
            raise WireError(f"{self.name}: its engine is closed")

    def _asked_there(self, deadline: float) -> dict[str, Any] | None:
        """Asks the seat for the actor; ``None`` if the seat has gone meanwhile."""
        tether = self._tether
        if tether is None:
            self._tether = tether = self._acquire(deadline)
            self._answers = queue.SimpleQueue()
            hearing = [tether, self._answers]
            threading.Thread(
                target=self._receive, args=hearing, name=self.name, daemon=True
            ).start()
        self._ended_pid = 0
        with contextlib.suppress(OSError):  # the thread hears of it, too
            send_words(tether, {"start": self._asked})
        return self._answers.get()

    def _acquire(self, deadline: float) -> socket.socket:
        """Connects to the seat, as soon as there is one, and it is free."""
        begun, is_told = monotonic(), False
        where = f"{self._where[0]}:{self._where[1]}"
        while True:
            try:
                sock = socket.create_connection(self._where, timeout=ACTOR_SECONDS)
                try:
                    authenticate(sock, self._key, SEAT)
                    sock.setblocking(True)
                    notice_silence(sock)
                    return sock
                except BaseException:
                    sock.close()
                    raise
            except WireError as error:
                raise WireError(f"{self.name} at {where}: {error}") from None
            except (EOFError, OSError) as error:
                reason = error
            if monotonic() >= deadline:
                raise ActorDied(
                    self.name,
                    f"nobody is free at {where} ({reason}); start it there, with the same "
                    f"MIRROR_ENGINE_KEY: mirror serve {where}",
                )
            if not is_told and monotonic() > begun + _TOLD_SECONDS:
                _logger.warning("waiting for %s: nobody is free at %s", self.name, where)
                is_told = True
            if self._is_ended.wait(_AGAIN_SECONDS):
                self._check_open()

    def _receive(self, tether: socket.socket, answers: _Answers) -> None:
        while True:
            try:
                message = receive_words(tether)
            except OSError:
                message = None
            if message is None:
                break
            if "ended" in message:
                self._note_end(message["ended"])
            else:
                answers.put(message)
        self._tether = None
        tether.close()
        self._note_end(self._pid)
        answers.put(None)

    def _note_end(self, pid: int) -> None:
        with self._news:
            self._ended_pid = pid
            if pid != self._pid or self._died.is_set():
                return
            self._died.set()
            callbacks = [] if self._is_ended.is_set() else list(self._callbacks)
        self._client.disconnect(ActorDied(self.name))
        for callback in callbacks:
            threading.Thread(target=callback, daemon=True).start()

    def _confirm(self) -> None:
        """Waits for the news of a death that a connection has told."""
        self._died.wait(_NEWS_SECONDS)
