"""Handshake: both ends of a new connection show that they have the key, which is never sent.

::

    actor     "mirror actor", version, a random number
    client    "mirror actor", version, another, HMAC of both with the key, as a client
    actor     verdict, HMAC of both with the key, as an actor

As ``multiprocessing.connection`` does it. What follows is not encrypted: a network is trusted, or
is loopback.
"""

from __future__ import annotations

import hmac
import os
import socket
import struct

from mirror.server.engine.engine_types import WireError

VERSION = 1
STRANGER_SECONDS = 10.0
"""How long who has connected to an actor may take to show that it has the key."""
ACTOR_SECONDS = 60.0
"""How long an actor may take, which may be busy."""

ACTOR, SEAT = b"mirror actor", b"a free seat."
"""Who says hello: an actor, or a seat on which there is none yet."""

_MAGIC = ACTOR
_SILENT_SECONDS = 15
_RANDOM = 32
_HELLO = struct.Struct(f"<{len(_MAGIC)}sI{_RANDOM}s")
_REPLY = struct.Struct(f"<{_HELLO.size}s32s")
_VERDICT = struct.Struct("<1s32s")
_WELCOME, _WRONG_KEY, _WRONG_VERSION = b"+", b"k", b"v"


def new_key() -> bytes:
    """Returns a key that nobody guesses."""
    return os.urandom(32)


def accept(sock: socket.socket, key: bytes, who: bytes = ACTOR) -> None:
    """The actor's side, or a seat's.

    Raises:
        WireError: the other side is none of ours, or has not this key.
    """
    with _Deadline(sock, STRANGER_SECONDS):
        hello = _HELLO.pack(who, VERSION, os.urandom(_RANDOM))
        sock.sendall(hello)
        theirs, proof = _REPLY.unpack(_received(sock, _REPLY.size))
        magic, version, _ = _HELLO.unpack(theirs)
        if magic != _MAGIC:
            raise WireError(f"a client of mirror says {_MAGIC!r}; got {magic!r}")
        if version != VERSION:
            sock.sendall(_VERDICT.pack(_WRONG_VERSION, b""))
            raise WireError(_versions(version))
        if not hmac.compare_digest(proof, _proof(key, b"client", hello, theirs)):
            sock.sendall(_VERDICT.pack(_WRONG_KEY, b""))
            raise WireError("a client has another key")
        sock.sendall(_VERDICT.pack(_WELCOME, _proof(key, b"actor", hello, theirs)))


def authenticate(sock: socket.socket, key: bytes, who: bytes = ACTOR) -> None:
    """The client's side.

    Raises:
        EOFError: there is a seat in place of an actor, or the other way round.
        WireError: the other side is none of ours, or has not this key.
    """
    with _Deadline(sock, ACTOR_SECONDS):
        hello = _received(sock, _HELLO.size)
        magic, version, _ = _HELLO.unpack(hello)
        if magic not in (ACTOR, SEAT):
            raise WireError(f"who listens there is no actor of mirror: it says {magic!r}")
        if magic != who:
            raise EOFError("the actor has ended" if magic == SEAT else "it serves another program")
        if version != VERSION:
            raise WireError(_versions(version))
        ours = _HELLO.pack(_MAGIC, VERSION, os.urandom(_RANDOM))
        sock.sendall(_REPLY.pack(ours, _proof(key, b"client", hello, ours)))
        verdict, proof = _VERDICT.unpack(_received(sock, _VERDICT.size))
        if verdict == _WRONG_VERSION:
            raise WireError("the actor speaks another version of this protocol")
        if verdict != _WELCOME:
            raise WireError("the actor has another key: it is another engine's")
        if not hmac.compare_digest(proof, _proof(key, b"actor", hello, ours)):
            raise WireError("who listens there does not have the engine's key")


def notice_silence(sock: socket.socket) -> None:
    """Has a connection end within a minute, on which nothing is said, if its other side is gone.

    The kernel asks, not the program: a machine that is cut off says nothing of its end.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _SILENT_SECONDS)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _SILENT_SECONDS // 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 6)


class _Deadline:
    """A socket that waits so long, and then not at all."""

    def __init__(self, sock: socket.socket, seconds: float) -> None:
        self._sock, self._seconds = sock, seconds

    def __enter__(self) -> None:
        self._sock.settimeout(self._seconds)

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        self._sock.setblocking(False)
        if kind is not None and issubclass(kind, TimeoutError):
            raise WireError(f"the other side said nothing for {self._seconds:g} s") from None


def _received(sock: socket.socket, size: int) -> bytes:
    got = b""
    while len(got) < size:
        more = sock.recv(size - len(got))
        if not more:
            raise EOFError("the other side has closed the connection")
        got += more
    return got


def _proof(key: bytes, who: bytes, hello: bytes, reply: bytes) -> bytes:
    return hmac.digest(key, who + hello + reply, "sha256")


def _versions(theirs: int) -> str:
    return f"the other side speaks version {theirs} of this protocol, this one {VERSION}"
