"""The engine of one machine: actors are processes, forked where torch is imported already.

[Note: Who ends with whom]
An actor never outlives who has started it, not even one killed by SIGKILL. It ends with its
tether, which the kernel closes with the owner; the fork server ends with the connection to the
owner, or when it has another parent; and the kernel kills actors with the fork server. So
whichever goes, and whatever was forked in between and holds descriptors open, nothing is left.
"""

from __future__ import annotations

import secrets
import threading
import weakref
from collections.abc import Callable, Sequence
from multiprocessing import spawn
from os import environ
from typing import Any

from mirror.server.engine.actor_process import bind, receive_words, send_words
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
from mirror.server.engine.fork_server import ForkedProcess, fork_server
from mirror.server.engine.handshake import new_key
from mirror.server.engine.socket_client import SocketClient, register_key

_NEWS_SECONDS = 1.0
_OF_SPAWN = (
    "sys_path",
    "sys_argv",
    "dir",
    "orig_dir",
    "init_main_from_name",
    "init_main_from_path",
)


class ProcessEngine(BaseEngine["ProcessActor"]):
    """Starts actors as processes on this machine.

    Args:
        host: where they listen: this machine alone, unless told otherwise.
    """

    def __init__(self, host: str = "127.0.0.1") -> None:
        super().__init__()
        self.id = secrets.token_hex(8)
        self._host, self._key = host, new_key()
        self._ends = weakref.finalize(self, _end_all, self._actors)
        register_key(self.id, self._key)
        fork_server()  # begins to import torch

    def _make(self, name: str, role: str, init: Header) -> ProcessActor:
        config = {"id": self.id, "key": self._key.hex(), "role": role, "init": init}
        return ProcessActor(name, self._host, config)

    def close(self) -> None:
        """See ``Engine``."""
        self._is_closed = True
        self._ends()


def _end_all(actors: list[ProcessActor]) -> None:
    for actor in actors:
        actor.begin_end()
    for actor in actors:
        actor.end()
    actors.clear()


class ProcessActor:
    """An actor in a process of this machine, as who has started it holds it."""

    def __init__(self, name: str, host: str, config: dict[str, Any], port: int = 0) -> None:
        self.name = name
        self._config = config
        # Bound, it keeps the port for the next process of this actor; it never listens.
        self._port = bind(host, port)
        where = {"host": host, "port": self._port.getsockname()[1]}
        self._config |= where
        self._client = SocketClient(
            {"engine": "process", "id": config["id"], "name": name, **where}, self._confirm
        )
        self._child: ForkedProcess | None = None
        self._callbacks: list[Callable[[], None]] = []
        self._lock = threading.RLock()
        self._is_ended = False

    @property
    def address(self) -> Address:
        """See ``Client``."""
        return self._client.address

    @property
    def pid(self) -> int:
        """Its process's."""
        assert self._child is not None
        return self._child.pid

    @property
    def alive(self) -> bool:
        """See ``Actor``."""
        child = self._child
        return child is not None and not child.ended.is_set()

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

    def on_death(self, callback: Callable[[], None]) -> None:
        """See ``Actor``."""
        with self._lock:
            self._callbacks.append(callback)
            if self._child is not None and not self.alive and not self._is_ended:
                threading.Thread(target=callback, daemon=True).start()

    def kill(self) -> None:
        """See ``Actor``."""
        if self._child is not None:
            self._child.kill()

    def restart(self) -> None:
        """See ``Actor``."""
        with self._lock:
            if self._is_ended:
                raise WireError(f"{self.name}: its engine is closed")
            if self._child is not None:
                self._child.kill()
            self._client.disconnect(ActorDied(self.name))
            child = fork_server().fork(self.name)
            try:
                self._set_up(child)
            except BaseException:
                child.kill()
                raise
            self._child = child
        child.on_end(lambda: self._note_death(child))

    def close(self) -> None:
        """See ``Client``."""
        self._client.close()

    def begin_end(self) -> None:
        """Has it end, without waiting for that."""
        self._is_ended = True
        if self._child is not None:
            self._child.begin_kill()

    def end(self) -> None:
        """Ends it for good."""
        with self._lock:
            self._is_ended = True
            self._client.disconnect(ActorDied(self.name))
            self._port.close()
            if self._child is not None:
                self._child.kill()

    def _set_up(self, child: ForkedProcess) -> None:
        prepared = spawn.get_preparation_data(self.name)
        kept = {key: prepared[key] for key in _OF_SPAWN if key in prepared}
        config = {**self._config, "environ": dict(environ), "prepared": kept}
        try:
            # Of its own: the other is closed at the news of an end, maybe before this is read.
            with child.tether.dup() as tether:
                send_words(tether, config)
                answer = receive_words(tether)
        except OSError:
            answer = None
        if answer is None:
            child.ended.wait()
            raise ActorDied(self.name, f"its process has ended ({child.code}) before it stood")
        if "failed" in answer:
            raise remote_error(answer["failed"], [bytes.fromhex(t) for t in answer["pickle"]])

    def _confirm(self) -> None:
        """Waits for the news of a death that a connection has told: afterwards it is not alive."""
        if self._child is not None:
            self._child.ended.wait(_NEWS_SECONDS)

    def _note_death(self, child: ForkedProcess) -> None:
        with self._lock:
            callbacks = [] if self._is_ended else list(self._callbacks)
        for callback in callbacks:
            callback()
