"""Listeners accept connections, and the handshake proves that both ends have the key.

The key itself is never sent::

    actor     "mirror actor", version, a random number
    client    "mirror actor", version, another random number, HMAC as a client
    actor     verdict, HMAC as an actor

A process without the key could forward the handshake of two others, and then send calls of its
own. So each HMAC covers more than the two messages. It covers the task that the client dialled:
the engine, the actor's name and, without TLS, its address. And it covers the channel: over TLS,
the hash of the key exchange ("tls-unique", RFC 5929). A process in between has one key exchange
with each side; these differ, and so do the proofs. TLS then protects all that follows. Without
TLS a connection stays on loopback, where only the administrator can get in between.

A process without the key may open any number of connections and send nothing, or a byte a
second. A handshake has one deadline (``CLIENT_SECONDS``), and no handshake waits for
another. If one address has too many unfinished handshakes, or all addresses together, the oldest
is closed. If the process has no descriptor left, the connection that asked for one is closed: a
spare descriptor is kept for that.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import select
import socket
import ssl
import struct
import sys
import threading
from collections.abc import Callable
from time import monotonic
from typing import Any, NamedTuple

from mirror.server.engine.channels import (
    Channel,
    Deadline,
    TlsSocket,
    begin_tls,
    receive,
    send,
    set_socket_options,
    wrap_in_tls,
)
from mirror.server.engine.engine_types import Address, WireError

VERSION = 2
CLIENT_SECONDS = 3.0
"""The most seconds of a whole handshake, for the process that connects."""
ACTOR_SECONDS = 60.0
"""The most seconds of a handshake for the actor, which may be busy."""

ACTOR, AGENT = b"mirror actor", b"mirror agent"
"""The kinds of listeners at an address: an actor, or a free node agent."""

_BACKLOG = 128
_RANDOM = 32
_HELLO = struct.Struct(f"<{len(ACTOR)}sI{_RANDOM}s")
_REPLY = struct.Struct(f"<{_HELLO.size}s32s")
_VERDICT = struct.Struct("<1s32s")
_WELCOME, _WRONG_KEY, _WRONG_VERSION = b"+", b"k", b"v"


class OtherListenerError(EOFError):
    """Something of mirror listens at an address, but not what was dialled."""


class Credentials(NamedTuple):
    """The facts that a handshake proves.

    Attributes:
        task: the task that the client dials.
        is_tls: whether the connection is encrypted.
        role: what listens there, or should: ``ACTOR`` or ``AGENT``.
    """

    key: bytes
    task: str
    is_tls: bool
    role: bytes = ACTOR


def actor_credentials(key: bytes, address: Address | dict[str, Any]) -> Credentials:
    """Returns the credentials for an actor's address."""
    task, is_tls = f"{address['id']}/{address['name']}", bool(address["tls"])
    if not is_tls:
        task += f" at {address['host']}:{address['port']}"
    return Credentials(key, task, is_tls)


def agent_credentials(key: bytes) -> Credentials:
    """Returns the credentials for node agents, which have no task yet."""
    return Credentials(key, "", True, AGENT)


def new_key() -> bytes:
    """Returns a new random key."""
    return os.urandom(32)


def bind(host: str, port: int) -> socket.socket:
    """Returns a socket that is bound to a port, and can listen there; 0 takes any free port.

    ``unlisten`` lets it refuse connections until it listens again. Raises OSError if another
    socket listens at the port.
    """
    while True:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        number = port
        if not number:
            # Linux keeps the number of a socket that stops listening only if it was asked for.
            with socket.socket(family, socket.SOCK_STREAM) as drawn:
                drawn.bind((host, 0))
                number = drawn.getsockname()[1]
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            # A connection that ended a moment ago must not block the port.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((host, number))
            sock.listen(_BACKLOG)
            unlisten(sock)
        except OSError:
            sock.close()
            if port:
                raise
            continue
        return sock


def listen(sock: socket.socket) -> None:
    """Makes a socket of ``bind`` listen."""
    sock.listen(_BACKLOG)


def unlisten(sock: socket.socket) -> None:
    """Makes a listening socket refuse connections, also those that are not accepted yet."""
    # Shutting down a socket that does not listen would shut down what it accepts later.
    if sock.fileno() >= 0 and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        sock.shutdown(socket.SHUT_RDWR)


def accept(sock: socket.socket, own: Credentials) -> Channel:
    """Runs the handshake of an actor, or of a node agent, and returns the channel.

    Raises:
        EOFError, OSError: the connection was closed or lost.
        WireError: the other side is not a client of mirror, does not have the key, or takes more
            than ``CLIENT_SECONDS``.
    """
    deadline = Deadline(CLIENT_SECONDS)
    channel: Channel = sock
    try:
        channel = _secure(sock, own, deadline, is_server=True)
        hello = _HELLO.pack(own.role, VERSION, os.urandom(_RANDOM))
        send(channel, hello, deadline)
        theirs, proof = _REPLY.unpack(receive(channel, _REPLY.size, deadline))
        magic, version, _ = _HELLO.unpack(theirs)
        if magic != ACTOR:
            raise WireError(f"a client of mirror sends {ACTOR!r}; got {magic!r}")
        if version != VERSION:
            send(channel, _VERDICT.pack(_WRONG_VERSION, b""), deadline)
            raise WireError(_version_error(version))
        if not hmac.compare_digest(proof, _proof(own, channel, b"client", hello, theirs)):
            send(channel, _VERDICT.pack(_WRONG_KEY, b""), deadline)
            raise WireError(
                "authentication failed: a client has another key, or dialled another task"
            )
        proof = _proof(own, channel, b"actor", hello, theirs)
        send(channel, _VERDICT.pack(_WELCOME, proof), deadline)
        return channel
    except TimeoutError as error:
        channel.close()
        raise WireError(f"a handshake did not end in time: {error}") from None
    except BaseException:
        channel.close()
        raise


def authenticate(sock: socket.socket, own: Credentials) -> Channel:
    """Runs the handshake of a client, and returns the channel.

    Raises:
        EOFError: the connection was closed.
        OtherListenerError: a free node agent listens in place of the actor, or the reverse.
        OSError: the connection was lost, or the other side took more than ``ACTOR_SECONDS``.
        WireError: the other side is not a process of mirror, or does not have the key.
    """
    deadline = Deadline(ACTOR_SECONDS)
    channel: Channel = sock
    try:
        channel = _secure(sock, own, deadline, is_server=False)
        hello = receive(channel, _HELLO.size, deadline)
        magic, version, _ = _HELLO.unpack(hello)
        if magic not in (ACTOR, AGENT):
            raise WireError(f"the process that listens is not a mirror actor: it sent {magic!r}")
        if version != VERSION:
            raise WireError(_version_error(version))
        if magic != own.role:
            raise OtherListenerError(
                "the actor has ended" if magic == AGENT else "it serves another program"
            )
        ours = _HELLO.pack(ACTOR, VERSION, os.urandom(_RANDOM))
        send(channel, _REPLY.pack(ours, _proof(own, channel, b"client", hello, ours)), deadline)
        verdict, proof = _VERDICT.unpack(receive(channel, _VERDICT.size, deadline))
        if verdict == _WRONG_VERSION:
            raise WireError("the actor has another version of this protocol")
        if verdict != _WELCOME:
            raise WireError(
                "authentication failed: the process that listens has another key, is another "
                "task, or this connection does not end there"
            )
        if not hmac.compare_digest(proof, _proof(own, channel, b"actor", hello, ours)):
            raise WireError("the process that listens does not have the engine's key")
        return channel
    except BaseException:
        channel.close()
        raise


def _secure(
    sock: socket.socket, own: Credentials, deadline: Deadline, *, is_server: bool
) -> Channel:
    """Returns a channel over a connected socket, which may be wrapped for TLS already."""
    sock.setblocking(False)
    if not own.is_tls:
        return sock
    if not isinstance(sock, ssl.SSLSocket):
        sock = wrap_in_tls(sock, is_server=is_server)
    return begin_tls(sock, deadline)


def _proof(own: Credentials, channel: Channel, side: bytes, hello: bytes, reply: bytes) -> bytes:
    """Returns the HMAC of one side; all parts but the last have a fixed size."""
    binding = channel.binding if isinstance(channel, TlsSocket) else b""
    parts = (struct.pack("<6sB", side, len(binding)), binding, hello, reply, own.task.encode())
    return hmac.digest(own.key, b"".join(parts), "sha256")


def _version_error(theirs: int) -> str:
    return f"the other side has version {theirs} of this protocol, this one {VERSION}"


MAX_PER_ADDRESS = 128
MAX_HANDSHAKES = 256

_EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_PAUSE_SECONDS = 0.05
_LOG_SECONDS = 1.0


class Listener:
    """Accepts connections in the thread that calls ``run``.

    Args:
        sock: a listening socket; it stays open.
        credentials: what the processes that connect must prove.
        deliver: is called with each channel after a successful handshake, in any thread.
    """

    def __init__(
        self, sock: socket.socket, credentials: Credentials, deliver: Callable[[Channel], None]
    ) -> None:
        self._sock, self._credentials, self._deliver = sock, credentials, deliver
        self._sock.setblocking(False)
        self._pending: dict[socket.socket, str] = {}
        self._lock = threading.Lock()
        self._spare = os.open(os.devnull, os.O_RDONLY)
        self._woken, self._wake = os.pipe()
        self._is_stopped = False
        self._num_refused, self._next_log = 0, 0.0

    def run(self) -> None:
        """Accepts connections until ``stop``."""
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        poll.register(self._woken, select.POLLIN)
        while True:
            ready = [descriptor for descriptor, _ in poll.poll()]
            if self._woken in ready:
                break
            try:
                sock, address = self._sock.accept()
            except OSError as error:
                if error.errno in _EXHAUSTED:
                    self._refuse_next(error)
                elif error.errno in (errno.EINVAL, errno.EBADF):
                    raise  # it does not listen any more
                continue  # the connection is gone already
            try:
                set_socket_options(sock)
                sock.setblocking(False)
                if self._credentials.is_tls:  # here, so that ``_shut`` finds the descriptor
                    sock = wrap_in_tls(sock, is_server=True)
            except OSError as error:
                self._refuse(sock, error)
                continue
            self._begin(sock, str(address[0]))
        with self._lock:
            for sock in self._pending:
                _shut(sock)
            for descriptor in (self._spare, self._woken, self._wake):
                with contextlib.suppress(OSError):
                    os.close(descriptor)
            self._wake = -1

    def stop(self) -> None:
        """Makes ``run`` return, and ends the handshakes that are not done."""
        with self._lock:
            self._is_stopped = True
            if self._wake >= 0:
                os.write(self._wake, b"+")

    def _begin(self, sock: socket.socket, host: str) -> None:
        with self._lock:
            same = [other for other, address in self._pending.items() if address == host]
            if len(same) >= MAX_PER_ADDRESS:
                _shut(same[0])
                del self._pending[same[0]]
            elif len(self._pending) >= MAX_HANDSHAKES:
                oldest = next(iter(self._pending))
                _shut(oldest)
                del self._pending[oldest]
            self._pending[sock] = host
        try:
            threading.Thread(target=self._shake_hands, args=[sock], daemon=True).start()
        except RuntimeError as error:  # no thread can be started
            self._refuse(sock, error)

    def _shake_hands(self, sock: socket.socket) -> None:
        try:
            channel = accept(sock, self._credentials)
        except (WireError, EOFError, OSError, MemoryError) as error:
            self._refuse(sock, error)
            return
        with self._lock:
            is_current = self._pending.pop(sock, None) is not None and not self._is_stopped
        if is_current:
            self._deliver(channel)
        else:
            channel.close()

    def _refuse(self, sock: socket.socket, error: BaseException) -> None:
        with self._lock:
            self._pending.pop(sock, None)
        sock.close()
        if not isinstance(error, EOFError):  # a probe that only connects is no attack
            self._log(f"refused a connection: {error}")

    def _refuse_next(self, error: OSError) -> None:
        """Closes the next connection, with the spare descriptor."""
        with contextlib.suppress(OSError):
            os.close(self._spare)
        with contextlib.suppress(OSError):
            self._sock.accept()[0].close()
        try:
            self._spare = os.open(os.devnull, os.O_RDONLY)
        except OSError:
            self._spare = -1
            threading.Event().wait(_PAUSE_SECONDS)
        self._log(f"refused a connection: {error}")

    def _log(self, line: str) -> None:
        """Prints at most a line per second: a flood of connections must not fill a disk."""
        self._num_refused += 1
        if monotonic() < self._next_log:
            return
        more = f" ({self._num_refused} since the last such line)" if self._num_refused > 1 else ""
        self._num_refused, self._next_log = 0, monotonic() + _LOG_SECONDS
        print(f"mirror: {line}{more}", file=sys.stderr, flush=True)


def _shut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_RDWR)
