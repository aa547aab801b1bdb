"""Seats: places at addresses where programs of other machines have their actors, in turn.

::

    owner     {"start": {"name": ..., "role": ..., "init": ..., "id": ...}}
    seat      {"standing": 4711}, or {"failed": ..., "pickle": ...}, or {"died": "..."}
    owner     {"kill": 4711}
    seat      {"ended": 4711}

A seat that is free listens; who shows that it has the key owns it, as long as that connection
stands. The actor then listens at the same address, in a process of its own, and ends with the
connection: the seat is free again.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
from typing import Any

from mirror.errors import ActorDied, RemoteError, WireError
from mirror.server.engine.actor_process import bind, listening, receive_words, send_words
from mirror.server.engine.fork_server import fork_server
from mirror.server.engine.handshake import SEAT, accept, notice_silence
from mirror.server.engine.process_engine import ProcessActor
from mirror.server.engine.service_loop import encode_error


class NodeAgent:
    """Serves programs that have the key, one after another, until it is closed.

    Args:
        port: 0: any that is free.
    """

    def __init__(self, host: str, port: int, key: bytes) -> None:
        self._host, self._key = host, key
        self._kept = bind(host, port)  # the port, while an actor listens there, or nobody
        self.port: int = self._kept.getsockname()[1]
        self._listener = listening(host, self.port)
        self._owner: socket.socket | None = None
        self._closing = threading.Event()
        fork_server()  # begins to import torch
        self._thread = threading.Thread(target=self._serve, name="seat", daemon=True)
        self._thread.start()

    def join(self, timeout: float | None = None) -> None:
        """Waits until it is closed."""
        self._thread.join(timeout)

    def close(self) -> None:
        """Ends the actor that sits here, and takes no other."""
        self._closing.set()
        for sock in (self._listener, self._owner):
            if sock is not None:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._kept.close()

    def _serve(self) -> None:
        while not self._closing.is_set():
            owner = self._owner = self._next_owner()
            # A listener here would take connections that are for the actor.
            self._listener.close()
            if owner is None:
                return
            if self._closing.is_set():
                owner.close()
                return
            with owner:
                _belong_to(owner, self._host, self.port, self._key)
            self._listener = listening(self._host, self.port)
        self._listener.close()

    def _next_owner(self) -> socket.socket | None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return None
            try:
                accept(sock, self._key, SEAT)
                sock.setblocking(True)
                notice_silence(sock)
                return sock
            except (WireError, EOFError, OSError) as error:
                print(f"mirror: refused a connection: {error}", file=sys.stderr, flush=True)
                sock.close()


def _belong_to(owner: socket.socket, host: str, port: int, key: bytes) -> None:
    """Does what an owner asks for, until it goes; then its actor ends."""
    actor: ProcessActor | None = None
    sending = threading.Lock()

    def tell(message: dict[str, Any]) -> None:
        with sending, contextlib.suppress(OSError):  # that it is gone is heard below
            send_words(owner, message)

    try:
        while (message := _receive(owner)) is not None:
            if "start" in message:
                if actor is not None:
                    actor.end()
                asked = message["start"]
                config = {"id": asked["id"], "key": key.hex()}
                config |= {"role": asked["role"], "init": asked["init"]}
                actor = ProcessActor(asked["name"], host, config, port)
                tell(_started(actor, tell))
            elif actor is not None:
                actor.kill()
    finally:
        if actor is not None:
            actor.end()


def _receive(owner: socket.socket) -> dict[str, Any] | None:
    try:
        return receive_words(owner)
    except OSError:  # it has said nothing for long
        return None


def _started(actor: ProcessActor, tell: Any) -> dict[str, Any]:
    actor.on_death(lambda: tell({"ended": actor.pid}))
    try:
        actor.restart()
    except RemoteError as error:
        content = {
            "type": error.type_name,
            "message": error.message,
            "traceback": error.traceback,
        }
        pickled = [] if error.original is None else encode_error(error.original)[1]
        return {"failed": content, "pickle": [text.hex() for text in pickled]}
    except (ActorDied, OSError) as error:
        return {"died": str(error)}
    return {"standing": actor.pid}
