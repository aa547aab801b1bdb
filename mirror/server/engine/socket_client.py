"""Clients of an actor by its address, in any process that has the engine's key."""

from __future__ import annotations

import itertools
import os
import random
import socket
import threading
from collections.abc import Sequence
from time import monotonic, sleep

from mirror.server.engine.channels import Channel, set_socket_options
from mirror.server.engine.connection import Connection, Reply, failed_reply
from mirror.server.engine.engine_types import (
    ActorDied,
    Address,
    Array,
    Header,
    Sendable,
    WireError,
)
from mirror.server.engine.handshake import (
    ACTOR_SECONDS,
    OtherListenerError,
    actor_credentials,
    authenticate,
)

KEY_VARIABLE = "MIRROR_ENGINE_KEY"
"""The variable with the key in hexadecimal, for processes that no engine has started."""

_MIN_KEY_BYTES = 16
# Pauses between attempts to connect, in seconds; random parts keep clients apart.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.01, 1.0
_jitter = random.Random()

_MIN_DISTINCT = 9  # of 16 bytes or more; random ones have 13 to 16

_keys: dict[str, bytes] = {}


def register_key(engine: str, key: bytes) -> None:
    """Stores the key of an engine, in the engine's process and in those of its actors."""
    _keys[engine] = key


class SocketClient:
    """Calls an actor over a socket; connects at the first call, and again after a disconnect."""

    def __init__(self, address: Address, timeout_seconds: float | None = None) -> None:
        self.name: str = address["name"]
        self.timeout_seconds = timeout_seconds
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

    def end_stalled(self) -> None:
        """Is called when a call has taken ``timeout_seconds``; an owner kills the process."""

    def state(self) -> str:
        """Returns what is known of the actor's process, for a warning."""
        return ""

    def _connect(self) -> Connection:
        with self._connect_lock:
            if self._connection is None or not self._connection.is_usable:
                self._connection = Connection(self._open(), self)
            return self._connection

    def _open(self) -> Channel:
        """Connects; tries again if the connection is closed before the handshake has ended.

        A listener that has too many unfinished handshakes closes the oldest, see handshake.py.
        """
        start = monotonic()
        seconds = ACTOR_SECONDS if self.timeout_seconds is None else self.timeout_seconds
        where = self._address["host"], self._address["port"]
        for attempt in itertools.count(1):
            try:
                sock = socket.create_connection(where, timeout=ACTOR_SECONDS)
            except OSError as error:
                raise ActorDied(self.name, f"no process listens at {where} ({error})") from None
            try:
                set_socket_options(sock)
                return authenticate(sock, actor_credentials(self._key, self._address))
            except OtherListenerError as error:
                raise ActorDied(self.name, f"its process has ended ({error})") from None
            except (EOFError, ConnectionError) as error:
                reason = error
            except OSError as error:
                raise ActorDied(self.name, f"its process has ended ({error})") from None
            pause = _jitter.uniform(0.5, 1.0) * min(_FIRST_PAUSE * 2**attempt, _LONGEST_PAUSE)
            if monotonic() + pause - start > seconds:
                break
            sleep(pause)
        raise ActorDied(
            self.name,
            f"{where} closed {attempt} connections within {seconds:g} s before the handshake had "
            f"ended ({reason}); its port may be flooded with connections",
        )


def key_of_environment() -> bytes:
    """Returns the key in MIRROR_ENGINE_KEY, which all processes of a cluster share.

    Raises:
        WireError: the variable is not set, its value is not a key, or the key can be guessed.
    """
    text = os.environ.get(KEY_VARIABLE, "")
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    reason = ""
    if len(key) < _MIN_KEY_BYTES:
        reason = "this is none" if text else "it is not set"
    elif not _looks_random(key):
        reason = "this one has a pattern, or is text, and can be guessed"
    if reason:
        raise WireError(
            f"{KEY_VARIABLE} is a random key in hexadecimal, of {_MIN_KEY_BYTES} bytes at least, "
            f"the same in all processes of a cluster; {reason}; make one: "
            "python -c 'import secrets; print(secrets.token_hex(32))'"
        )
    return key


def environment_without_key() -> dict[str, str]:
    """Returns this process's environment for processes that run users' code."""
    return {name: value for name, value in os.environ.items() if name != KEY_VARIABLE}


def _looks_random(key: bytes) -> bool:
    """Returns whether a key has many different bytes, no steady steps, and is no text.

    One in 10 million random keys of 16 bytes fails, and of longer ones far fewer.
    """
    steps = {(a - b) % 256 for a, b in itertools.pairwise(key)}
    is_text = all(32 <= byte < 127 for byte in key)
    return len(set(key)) >= _MIN_DISTINCT and len(steps) >= _MIN_DISTINCT and not is_text


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
