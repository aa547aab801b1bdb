"""Node agents: each serves one address, and runs an actor there for one program after another.

::

    owner     {"start": {"name": ..., "role": ..., "init": ..., "id": ...}}
    agent     {"ready": 4711}, or {"failed": ..., "pickle": ...}, or {"died": "..."}
    owner     {"kill": 4711}
    agent     {"ended": 4711}

A free agent listens. A program that proves that it has the key owns the agent until that
connection, the lifeline, closes. Meanwhile the actor listens at the same address, in a process of
its own. When the lifeline closes, the actor ends and the agent is free again.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

from mirror.errors import ActorDied, RemoteError, WireError
from mirror.server.engine.fork_server import fork_server
from mirror.server.engine.handshake import AGENT, accept, bind, enable_keepalive, listen
from mirror.server.engine.lifeline import failure_message, receive_message, send_message
from mirror.server.engine.process_engine import ProcessActor


class NodeAgent:
    """Serves programs that have the key, one after another, until it is closed.

    Args:
        port: 0 takes any free port.
    """

    def __init__(self, host: str, port: int, key: bytes) -> None:
        self._host, self._key = host, key
        # Reserves the port between two listeners: the agent's and the actor's.
        self._reserved = bind(host, port)
        self.port: int = self._reserved.getsockname()[1]
        self._listener = listen(host, self.port)
        self._owner: socket.socket | None = None
        self._closing = threading.Event()
        fork_server()  # starts to import torch
        self._thread = threading.Thread(target=self._serve, name="node agent", daemon=True)
        self._thread.start()

    def join(self, timeout: float | None = None) -> None:
        """Waits until the agent is closed, for ``timeout`` seconds at most."""
        self._thread.join(timeout)

    def close(self) -> None:
        """Ends the actor, and accepts no other program."""
        self._closing.set()
        for sock in (self._listener, self._owner):
            if sock is not None:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._reserved.close()

    def _serve(self) -> None:
        while not self._closing.is_set():
            owner = self._owner = self._accept_owner()
            # While the actor listens, this listener would take some of its connections.
            self._listener.close()
            if owner is None:
                return
            if self._closing.is_set():
                owner.close()
                return
            with owner:
                _serve_owner(owner, self._host, self.port, self._key)
            self._listener = listen(self._host, self.port)
        self._listener.close()

    def _accept_owner(self) -> socket.socket | None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return None
            try:
                accept(sock, self._key, AGENT)
                sock.setblocking(True)
                enable_keepalive(sock)
                return sock
            except (WireError, EOFError, OSError) as error:
                print(f"mirror: refused a connection: {error}", file=sys.stderr, flush=True)
                sock.close()


def _serve_owner(owner: socket.socket, host: str, port: int, key: bytes) -> None:
    """Starts and kills the actor as the owner asks, until the owner ends; then stops the actor."""
    actor: ProcessActor | None = None
    sending = threading.Lock()

    def send(message: dict[str, Any]) -> None:
        with sending, contextlib.suppress(OSError):  # the loop below notices the owner's end
            send_message(owner, message)

    try:
        while (message := receive_message(owner)) is not None:
            if "start" in message:
                if actor is not None:
                    actor.stop()
                start = message["start"]
                config = {"id": start["id"], "key": key.hex()}
                config |= {"role": start["role"], "init": start["init"]}
                actor = ProcessActor(start["name"], host, config, port)
                send(_start(actor, send))
            elif actor is not None:
                actor.kill()
    finally:
        if actor is not None:
            actor.stop()


def _start(actor: ProcessActor, send: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    actor.on_death(lambda: send({"ended": actor.pid}))
    try:
        actor.restart()
    except RemoteError as error:
        return failure_message(error)
    except (ActorDied, OSError) as error:
        return {"died": str(error)}
    return {"ready": actor.pid}
