"""Clients of an actor by its address, in any process that has the engine's key."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Sequence

from mirror.server.engine.connection import Connection, Reply, failed_reply
from mirror.server.engine.engine_types import (
    ActorClient,
    ActorDied,
    Address,
    Array,
    Header,
    Sendable,
    WireError,
)
from mirror.server.engine.handshake import ACTOR_SECONDS, authenticate

KEY_VARIABLE = "MIRROR_ENGINE_KEY"
"""Has the key in hexadecimal, for processes that were not started by an engine."""

_MIN_KEY_BYTES = 16

_keys: dict[str, bytes] = {}


def register_key(engine: str, key: bytes) -> None:
    """Stores the key of an engine, in the engine's process and in those of its actors."""
    _keys[engine] = key


def connect(address: Address) -> ActorClient:
    """Returns a client of an actor, which connects at the first call.

    Args:
        address: the ``address`` of an actor or a client.

    Raises:
        WireError: the argument is not an address, or this process does not have the key.
    """
    engine = address.get("engine") if isinstance(address, dict) else None
    if engine == "ray":
        from mirror.server.engine.ray_client import RayClient  # imports Ray

        return RayClient(address)
    if engine != "process":
        raise WireError(f"an address is the value of actor.address; got {address!r}")
    return SocketClient(address)


class SocketClient:
    """Calls an actor over a socket; connects at the first call, and again after a disconnect."""

    def __init__(self, address: Address) -> None:
        self.name: str = address["name"]
        self._address = dict(address)
        self._connection: Connection | None = None
        self._connect_lock = threading.Lock()
        self._key = _key_of(address)

    @property
    def address(self) -> Address:
        """See ``ActorClient``."""
        return dict(self._address)

    def call(
        self,
        method: str,
        header: Header | None = None,
        buffers: Sequence[Sendable] = (),
        *,
        into: Sequence[Array] | None = None,
    ) -> Reply:
        """See ``ActorClient``."""
        connection = self._connection
        if connection is None or not connection.is_usable:
            try:
                connection = self._connect()
            except ActorDied as error:
                self.confirm_death()
                return failed_reply(error)
        return connection.call(method, header or {}, buffers, into)

    def close(self) -> None:
        """See ``ActorClient``."""
        self.disconnect(WireError(f"{self.name}: the client is closed"))

    def disconnect(self, error: Exception) -> None:
        """Closes the connection; calls that are not done fail with the error."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.end(error)

    def confirm_death(self) -> None:
        """Is called before calls fail because the actor has died; an owner waits for the news."""

    def _connect(self) -> Connection:
        with self._connect_lock:
            if self._connection is None or not self._connection.is_usable:
                self._connection = Connection(self._open(), self.name, self.confirm_death)
            return self._connection

    def _open(self) -> socket.socket:
        where = self._address["host"], self._address["port"]
        try:
            sock = socket.create_connection(where, timeout=ACTOR_SECONDS)
        except OSError as error:
            raise ActorDied(self.name, f"no process listens at {where} ({error})") from None
        try:
            # A call is often one small packet, which must not wait for the next one.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            authenticate(sock, self._key)
        except (EOFError, OSError) as error:
            sock.close()
            raise ActorDied(self.name, f"its process has ended ({error})") from None
        except BaseException:
            sock.close()
            raise
        return sock


def key_of_environment() -> bytes:
    """Returns the key in MIRROR_ENGINE_KEY, which all processes of a cluster share.

    Raises:
        WireError: the variable is not set, or its value is not a key.
    """
    text = os.environ.get(KEY_VARIABLE, "")
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) < _MIN_KEY_BYTES:
        raise WireError(
            f"{KEY_VARIABLE} is a key in hexadecimal, of {_MIN_KEY_BYTES} bytes at least, the "
            f"same in all processes of a cluster; {'this is none' if text else 'it is not set'}; "
            "make one: python -c 'import secrets; print(secrets.token_hex(32))'"
        )
    return key


def _key_of(address: Address) -> bytes:
    key = _keys.get(address["id"])
    if key is None and KEY_VARIABLE in os.environ:
        key = key_of_environment()
    if key is None:
        raise WireError(
            f"{address['name']} is an actor of another program's engine, and this process does "
            f"not have that engine's key; set {KEY_VARIABLE} to the same key in both"
        )
    return key
