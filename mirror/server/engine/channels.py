"""Channels: connections that do not block, with or without TLS, and their deadlines.

A channel is a plain socket on loopback, and a ``TlsSocket`` elsewhere. TLS encrypts, and protects
every byte from changes. It has no certificates, since the processes of a cluster share a key
already: the key exchange is anonymous (Diffie-Hellman, group ffdhe3072 of RFC 7919), and the
handshake proves afterwards that both ends have the key and see the same channel; see
``handshake.py``.
"""

from __future__ import annotations

import functools
import itertools
import select
import socket
import ssl
import threading
from collections.abc import Sequence
from pathlib import Path
from time import monotonic

from mirror.errors import WireError

_CIPHERS = "ADH-AES256-GCM-SHA384:@SECLEVEL=0"  # a level above 0 forbids anonymous ciphers
_GROUP = Path(__file__).with_name("ffdhe3072.pem")
_BINDING = "tls-unique"
_CHUNK_BYTES = 1 << 16
_KEEPALIVE_SECONDS = 15


class TlsSocket:
    """A TLS connection, with the methods of a non-blocking socket that its users need.

    OpenSSL must not read and write one connection in two threads at the same time. So a lock
    guards every operation; none of them waits.
    """

    def __init__(self, sock: ssl.SSLSocket) -> None:
        self._sock, self._lock = sock, threading.Lock()
        self.binding = sock.get_channel_binding(_BINDING) or b""

    def fileno(self) -> int:
        """Returns the descriptor, for polls."""
        return self._sock.fileno()

    def pending(self) -> int:
        """Returns the number of decrypted bytes, which a poll does not see."""
        with self._lock:
            return self._sock.pending()

    def recv_into(self, view: memoryview) -> int:
        """Receives bytes; raises as a socket does."""
        try:
            with self._lock:
                return self._sock.recv_into(view)
        except ssl.SSLWantReadError:
            raise BlockingIOError from None
        except ssl.SSLError as error:
            raise ConnectionError(str(error)) from None

    def sendmsg(self, pieces: Sequence[memoryview]) -> int:
        """Sends the first bytes of the pieces.

        After a BlockingIOError, the next call must send the same bytes, and maybe more.
        """
        data = pieces[0][:_CHUNK_BYTES]
        if data.nbytes < _CHUNK_BYTES and len(pieces) > 1:
            ends = itertools.accumulate(piece.nbytes for piece in pieces)
            count = next((i for i, end in enumerate(ends, 1) if end >= _CHUNK_BYTES), None)
            data = memoryview(b"".join(pieces[:count]))[:_CHUNK_BYTES]
        try:
            with self._lock:
                return self._sock.send(data)
        except ssl.SSLWantWriteError:
            raise BlockingIOError from None
        except ssl.SSLError as error:
            raise ConnectionError(str(error)) from None

    def shutdown(self, how: int) -> None:
        """Ends the connection and wakes threads that poll it."""
        # SSLSocket.shutdown would let later reads return encrypted bytes.
        socket.socket.shutdown(self._sock, how)

    def close(self) -> None:
        """Closes the descriptor."""
        with self._lock:
            self._sock.close()


Channel = socket.socket | TlsSocket
"""Does not block."""


class Deadline:
    """The end of a wait that has several parts; ``None`` is a wait without an end."""

    def __init__(self, seconds: float | None) -> None:
        self._end = None if seconds is None else monotonic() + seconds

    def wait(self, channel: Channel, event: int) -> None:
        """Waits until a channel can be read or written; raises TimeoutError after the deadline."""
        poll = select.poll()
        poll.register(channel, event)
        if not poll.poll(None if self._end is None else max(0.0, self._end - monotonic()) * 1e3):
            raise TimeoutError("the other side took too long")


def set_socket_options(sock: socket.socket) -> None:
    """Sets the options of a TCP connection: small packets at once, and keepalive.

    If the other machine is unreachable, an idle connection ends within a minute. The kernel sends
    the probes, not the program.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_SECONDS)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_SECONDS // 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 6)


def wrap_in_tls(sock: socket.socket, *, is_server: bool) -> ssl.SSLSocket:
    """Returns a TLS socket that takes over a non-blocking socket; sends nothing yet."""
    return _context(is_server).wrap_socket(
        sock, server_side=is_server, do_handshake_on_connect=False
    )


def begin_tls(sock: ssl.SSLSocket, deadline: Deadline) -> TlsSocket:
    """Runs TLS's own handshake, and returns the channel; closes the socket if that fails.

    Raises:
        EOFError: the connection was closed.
        WireError: the other side does not speak TLS.
        TimeoutError: the deadline passed.
    """
    try:
        while True:
            try:
                sock.do_handshake()
                return TlsSocket(sock)
            except ssl.SSLWantReadError:
                deadline.wait(sock, select.POLLIN)
            except ssl.SSLWantWriteError:
                deadline.wait(sock, select.POLLOUT)
            except ssl.SSLEOFError:
                raise EOFError("the other side has closed the connection") from None
            except ssl.SSLError as error:
                raise WireError(f"the other side has no TLS as mirror has: {error}") from None
    except BaseException:
        sock.close()
        raise


@functools.cache
def _context(is_server: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    # TLS 1.3 has no anonymous key exchange, and Python no channel binding for it.
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_TICKET | ssl.OP_NO_COMPRESSION
    context.set_ciphers(_CIPHERS)
    if is_server:
        context.load_dh_params(str(_GROUP))
    return context


def receive(channel: Channel, size: int, deadline: Deadline) -> bytes:
    """Returns exactly this many bytes; raises EOFError at the end of the connection."""
    received = bytearray(size)
    view = memoryview(received)
    while view.nbytes:
        try:
            count = channel.recv_into(view)
        except BlockingIOError:
            deadline.wait(channel, select.POLLIN)
            continue
        if not count:
            raise EOFError("the other side has closed the connection")
        view = view[count:]
    return bytes(received)


def send(channel: Channel, data: bytes, deadline: Deadline) -> None:
    """Sends bytes."""
    view = memoryview(data)
    while view.nbytes:
        try:
            view = view[channel.sendmsg([view]) :]
        except BlockingIOError:
            deadline.wait(channel, select.POLLOUT)
