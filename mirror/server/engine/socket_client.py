"""Clients of an actor, by its address: of any process that has the engine's key."""

from __future__ import annotations

import importlib
import os
import socket
import threading
from collections.abc import Callable, Sequence

from mirror.server.engine.connection import Connection, Reply, failed
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
"""The key in hexadecimal, for processes that no engine has started."""

_LEAST_BYTES = 16

_keys: dict[str, bytes] = {}


def register_key(engine: str, key: bytes) -> None:
    """Notes an engine's key: this process is the engine's, or one of its actors."""
    _keys[engine] = key


def connect(address: Address) -> ActorClient:
    """Returns a client of an actor; it connects at the first call.

    Args:
        address: the ``address`` of an actor or a client.

    Raises:
        WireError: this is no address, or the key is not known here.
    """
    engine = address.get("engine") if isinstance(address, dict) else None
    if engine == "ray":
        ray_engine = importlib.import_module("mirror.server.engine.ray_engine")
        client: ActorClient = ray_engine.connect(address)
        return client
    if engine != "process":
        raise WireError(f"an address is what an actor has as its address; got {address!r}")
    return SocketClient(address)


class SocketClient:
    """Calls an actor over sockets; connects when there is something to say, and again.

    Args:
        confirm: called before anybody is told that the actor has died.
    """

    def __init__(self, address: Address, confirm: Callable[[], object] | None = None) -> None:
        self._confirm = confirm
        self.name: str = address["name"]
        self._address = dict(address)
        self._link: Connection | None = None
        self._lock = threading.Lock()
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
        link = self._link
        if link is None or not link.is_usable:
            try:
                link = self._connected()
            except ActorDied as error:
                if self._confirm is not None:
                    self._confirm()
                return failed(error)
        return link.call(method, header or {}, buffers, into)

    def close(self) -> None:
        """See ``ActorClient``."""
        self.disconnect(WireError(f"{self.name}: the client is closed"))

    def disconnect(self, error: Exception) -> None:
        """Ends the connection; calls that are not done fail with the error."""
        link, self._link = self._link, None
        if link is not None:
            link.end(error)

    def _connected(self) -> Connection:
        with self._lock:
            if self._link is None or not self._link.is_usable:
                self._link = Connection(self._socket(), self.name, self._confirm)
            return self._link

    def _socket(self) -> socket.socket:
        where = self._address["host"], self._address["port"]
        try:
            sock = socket.create_connection(where, timeout=ACTOR_SECONDS)
        except OSError as error:
            raise ActorDied(self.name, f"nobody listens at {where} ({error})") from None
        try:
            # One call is one small packet, which must not wait for another.
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
    """Returns the key that whoever starts the processes of a cluster has given them.

    Raises:
        WireError: it has given none, or what is none.
    """
    text = os.environ.get(KEY_VARIABLE, "")
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) < _LEAST_BYTES:
        raise WireError(
            f"{KEY_VARIABLE} is a key in hexadecimal, of {_LEAST_BYTES} bytes at least, the same "
            f"in all processes of a cluster; {'it is not set' if not text else 'this is none'}; "
            "make one: python -c 'import secrets; print(secrets.token_hex(32))'"
        )
    return key


def _key_of(address: Address) -> bytes:
    key = _keys.get(address["id"])
    if key is None and KEY_VARIABLE in os.environ:
        key = key_of_environment()
    if key is None:
        raise WireError(
            f"{address['name']} is an actor of another program's engine, whose key is not known "
            f"here; actors know their engine's, other processes find it in {KEY_VARIABLE}"
        )
    return key
