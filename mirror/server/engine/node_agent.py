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
import errno
import socket
import sys
import threading
from collections.abc import Callable, Collection
from typing import Any

from mirror.errors import ActorDied, ListenError, RemoteError, WireError
from mirror.server.engine.actor_process import failure_message, receive_message, send_message
from mirror.server.engine.channels import Channel
from mirror.server.engine.fork_server import fork_server
from mirror.server.engine.handshake import Listener, agent_credentials, bind, listen, unlisten
from mirror.server.engine.process_engine import ProcessActor
from mirror.server.engine.socket_client import register_key

_CLOSE_SECONDS = 15.0
_SEND_SECONDS = 60.0


class NodeAgent:
    """Serves programs that have the key, one after another, until it is closed.

    Args:
        port: 0 takes any free port.
        roles: the roles that a program may start.

    Raises:
        ListenError: the process cannot listen at the address, since another one does, for example.
    """

    def __init__(self, host: str, port: int, key: bytes, roles: Collection[str]) -> None:
        self._host, self._key, self._roles = host, key, frozenset(roles)
        self._sock = _listen_at(host, port)
        self.port: int = self._sock.getsockname()[1]
        self._listener: Listener | None = None
        self._owner: Channel | None = None
        self._error: BaseException | None = None
        self._closing = threading.Event()
        fork_server()  # starts to import torch
        self._thread = threading.Thread(target=self._serve, name="node agent", daemon=True)
        self._thread.start()

    def join(self, timeout: float | None = None) -> None:
        """Waits until the agent is closed, for ``timeout`` seconds at most.

        Raises:
            BaseException: the error for which the agent has stopped serving.
        """
        self._thread.join(timeout)
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Ends the actor, and accepts no other program."""
        self._closing.set()
        listener, owner = self._listener, self._owner
        if listener is not None:
            listener.stop()
        if owner is not None:
            with contextlib.suppress(OSError):
                owner.shutdown(socket.SHUT_RDWR)
        self._thread.join(_CLOSE_SECONDS)
        self._sock.close()

    def _serve(self) -> None:
        try:
            while (owner := self._accept_owner()) is not None:
                self._owner = owner
                try:
                    if not self._closing.is_set():
                        self._serve_owner(owner)
                except Exception as error:  # a program's message ends only its own connection
                    print(f"mirror: closed a connection: {error!r}", file=sys.stderr, flush=True)
                finally:
                    owner.close()
                if self._closing.is_set():
                    return
                listen(self._sock)
        except BaseException as error:
            self._error = error
        finally:
            unlisten(self._sock)

    def _accept_owner(self) -> Channel | None:
        """Returns the connection of the next program with the key; None after ``close``."""
        owners: list[Channel] = []

        def deliver(channel: Channel) -> None:
            owners.append(channel)
            listener.stop()

        listener = self._listener = Listener(self._sock, agent_credentials(self._key), deliver)
        if self._closing.is_set():
            listener.stop()
        listener.run()
        for other in owners[1:]:
            other.close()
        return owners[0] if owners else None

    def _serve_owner(self, owner: Channel) -> None:
        """Starts and kills the actor as the owner asks, until the owner ends; then stops it."""
        actor: ProcessActor | None = None
        sending = threading.Lock()

        def send(message: dict[str, Any]) -> None:
            with sending, contextlib.suppress(OSError):  # the loop below notices the owner's end
                send_message(owner, message, _SEND_SECONDS)

        try:
            while (message := receive_message(owner)) is not None:
                if "start" in message:
                    if actor is not None:
                        actor.stop()
                        actor = None
                    start = message["start"]
                    if start["role"] not in self._roles:
                        error = WireError(f"a role is one of {sorted(self._roles)}")
                        send(failure_message(error))
                        continue
                    actor = self._make_actor(start)
                    send(_start(actor, send))
                elif actor is not None:
                    actor.kill()
        finally:
            if actor is not None:
                actor.stop()

    def _make_actor(self, start: dict[str, Any]) -> ProcessActor:
        address = {
            "engine": "process",
            "id": start["id"],
            "name": start["name"],
            "host": self._host,
            "port": self.port,
            "tls": True,
        }
        register_key(start["id"], self._key)
        config = {"key": self._key.hex(), "role": start["role"], "init": start["init"]}
        return ProcessActor(address, self._sock.dup(), config)


def _start(actor: ProcessActor, send: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    actor.on_death(lambda: send({"ended": actor.pid}))
    try:
        actor.restart()
    except RemoteError as error:
        return failure_message(error)
    except (ActorDied, OSError) as error:
        return {"died": str(error)}
    return {"ready": actor.pid}


_REMEDIES = {
    errno.EADDRINUSE: "end the process that listens there, or serve at another port",
    errno.EACCES: "ports below 1024 need privileges; serve at another port",
}
_OTHER_MACHINE = (
    "serve at an address of this machine, or listen on all networks with host='0.0.0.0' "
    "(--host 0.0.0.0)"
)


def _listen_at(host: str, port: int) -> socket.socket:
    """Returns a socket that listens at an address; raises ListenError if that cannot be."""
    try:
        sock = bind(host, port)
        listen(sock)
    except (OSError, UnicodeError) as error:  # the encoding of host names
        number: Any = getattr(error, "errno", None)
        remedy = _REMEDIES.get(number, _OTHER_MACHINE)
        reason = getattr(error, "strerror", None) or error
        raised = ListenError(f"cannot listen at {host}:{port}: {reason}; {remedy}")
        raised.errno = number
        raise raised from error
    return sock
