"""A listener accepts connections; the handshake of each runs in a thread of its own.

[Note: Floods]
A process without the key may open any number of connections and send nothing, or a byte a
second. A handshake has one deadline (``handshake.CLIENT_SECONDS``), and no handshake waits for
another. If one address has too many unfinished handshakes, or all addresses together, the oldest
is closed. If the process has no descriptor left, the connection that asked for one is closed: a
spare descriptor is kept for that.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import sys
import threading
from collections.abc import Callable
from time import monotonic

from mirror.errors import WireError
from mirror.server.engine.channels import Channel, set_options, wrap_in_tls
from mirror.server.engine.handshake import Credentials, accept

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
        deliver: is called with each channel whose handshake succeeded, in any thread.
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
                set_options(sock)
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
        """Lets ``run`` return, and ends the handshakes that are not done."""
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
        """Closes the next connection, with the spare descriptor; see [Note: Floods]."""
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
