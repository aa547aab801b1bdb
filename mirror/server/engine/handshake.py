"""New connections: listening sockets, and the handshake by which both ends authenticate.

Both ends prove that they have the key; the key itself is never sent::

    actor     "mirror actor", version, a random number
    client    "mirror actor", version, another random number, HMAC of both as a client
    actor     verdict, HMAC of both as an actor

``multiprocessing.connection`` does the same. The calls that follow are not encrypted: use loopback
or a trusted network.
"""

from __future__ import annotations

import hmac
import os
import socket
import struct

from mirror.server.engine.engine_types import WireError

VERSION = 1
CLIENT_SECONDS = 10.0
"""How long a process that connects to an actor may take to prove that it has the key."""
ACTOR_SECONDS = 60.0
"""How long an actor may take; it may be busy."""

ACTOR, AGENT = b"mirror actor", b"mirror agent"
"""What listens at an address: an actor, or a free node agent."""

_KEEPALIVE_SECONDS = 15
_RANDOM = 32
_HELLO = struct.Struct(f"<{len(ACTOR)}sI{_RANDOM}s")
_REPLY = struct.Struct(f"<{_HELLO.size}s32s")
_VERDICT = struct.Struct("<1s32s")
_WELCOME, _WRONG_KEY, _WRONG_VERSION = b"+", b"k", b"v"


def new_key() -> bytes:
    """Returns a new random key."""
    return os.urandom(32)


def bind(host: str, port: int) -> socket.socket:
    """Returns a socket that is bound to a port; 0 takes any free port.

    Other sockets of this user may bind the same port. An actor's owner keeps one, which does not
    listen, as long as the actor may restart.
    """
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind((host, port))
    except OSError:
        sock.close()
        raise
    return sock


def listen(host: str, port: int) -> socket.socket:
    """Returns a socket that listens at a port; see ``bind``."""
    sock = bind(host, port)
    sock.listen(128)
    return sock


def accept(sock: socket.socket, key: bytes, role: bytes = ACTOR) -> None:
    """Runs the handshake of an actor, or of a node agent.

    Raises:
        WireError: the other side is not a client of mirror, or does not have the key.
    """
    with _Deadline(sock, CLIENT_SECONDS):
        hello = _HELLO.pack(role, VERSION, os.urandom(_RANDOM))
        sock.sendall(hello)
        theirs, proof = _REPLY.unpack(_receive(sock, _REPLY.size))
        magic, version, _ = _HELLO.unpack(theirs)
        if magic != ACTOR:
            raise WireError(f"a client of mirror sends {ACTOR!r}; got {magic!r}")
        if version != VERSION:
            sock.sendall(_VERDICT.pack(_WRONG_VERSION, b""))
            raise WireError(_version_error(version))
        if not hmac.compare_digest(proof, _proof(key, b"client", hello, theirs)):
            sock.sendall(_VERDICT.pack(_WRONG_KEY, b""))
            raise WireError("authentication failed: a client has another key")
        sock.sendall(_VERDICT.pack(_WELCOME, _proof(key, b"actor", hello, theirs)))


def authenticate(sock: socket.socket, key: bytes, role: bytes = ACTOR) -> None:
    """Runs the handshake of a client.

    Args:
        role: what the client wants to talk to, ``ACTOR`` or ``AGENT``.

    Raises:
        EOFError: a free node agent listens in place of the actor, or an actor in place of it.
        WireError: the other side is not a process of mirror, or does not have the key.
    """
    with _Deadline(sock, ACTOR_SECONDS):
        hello = _receive(sock, _HELLO.size)
        magic, version, _ = _HELLO.unpack(hello)
        if magic not in (ACTOR, AGENT):
            raise WireError(f"the process that listens is no actor of mirror: it sent {magic!r}")
        if magic != role:
            raise EOFError(
                "the actor has ended" if magic == AGENT else "it serves another program"
            )
        if version != VERSION:
            raise WireError(_version_error(version))
        ours = _HELLO.pack(ACTOR, VERSION, os.urandom(_RANDOM))
        sock.sendall(_REPLY.pack(ours, _proof(key, b"client", hello, ours)))
        verdict, proof = _VERDICT.unpack(_receive(sock, _VERDICT.size))
        if verdict == _WRONG_VERSION:
            raise WireError("the actor has another version of this protocol")
        if verdict != _WELCOME:
            raise WireError("authentication failed: the actor has another key, of another engine")
        if not hmac.compare_digest(proof, _proof(key, b"actor", hello, ours)):
            raise WireError("the process that listens does not have the engine's key")


def enable_keepalive(sock: socket.socket) -> None:
    """Lets an idle connection end within a minute if the other machine is unreachable.

    The kernel sends the probes, not the program: a machine that is cut off sends no end of stream.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_SECONDS)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_SECONDS // 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 6)


class _Deadline:
    """Lets a socket wait for some seconds inside ``with``; afterwards it does not block."""

    def __init__(self, sock: socket.socket, seconds: float) -> None:
        self._sock, self._seconds = sock, seconds

    def __enter__(self) -> None:
        self._sock.settimeout(self._seconds)

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        self._sock.setblocking(False)
        if kind is not None and issubclass(kind, TimeoutError):
            raise WireError(f"the other side sent nothing for {self._seconds:g} s") from None


def _receive(sock: socket.socket, size: int) -> bytes:
    received = b""
    while len(received) < size:
        more = sock.recv(size - len(received))
        if not more:
            raise EOFError("the other side has closed the connection")
        received += more
    return received


def _proof(key: bytes, side: bytes, hello: bytes, reply: bytes) -> bytes:
    return hmac.digest(key, side + hello + reply, "sha256")


def _version_error(theirs: int) -> str:
    return f"the other side has version {theirs} of this protocol, this one {VERSION}"
