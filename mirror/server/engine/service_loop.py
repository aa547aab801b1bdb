"""What an actor does all day: reads calls, runs methods, answers.

[Note: Slow readers]
An answer is sent before the next method begins, from where the method has it: so a server may
return its values themselves, uncopied. But nobody is made to wait for a client that does not read:
after a moment in which it took nothing, the rest of its answer is copied and sent beside
other work.
"""

from __future__ import annotations

import contextlib
import pickle
import select
import socket
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from mirror.errors import short_repr
from mirror.server.engine.engine_types import Header, Sendable, WireError
from mirror.server.engine.frames import ANSWER, CALL, RAISED, Frame, FrameReader, FrameWriter
from mirror.server.engine.handshake import accept

PATIENCE_SECONDS = 0.03
_MAX_THREADS = 256
_MAX_STRANGERS = 64  # connections whose handshake is under way


class _Connection:
    """A client's, in the actor."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.reader = FrameReader(sock)
        self.backlog: deque[FrameWriter] = deque()
        self.sending = threading.Lock()
        self.writable = select.poll()
        self.writable.register(sock, select.POLLOUT)

    def send_now(self, out: FrameWriter) -> bool:
        """Sends while the client takes something; returns whether that was all."""
        while not self.backlog:
            if out.send(self.sock):
                return True
            if not self.writable.poll(PATIENCE_SECONDS * 1e3):
                break
        return False

    def send_wholly(self, out: FrameWriter) -> None:
        """Sends all of it."""
        with self.sending:
            while not out.send(self.sock):
                self.writable.poll()


class ServiceLoop:
    """Answers the calls of an actor's clients, in the thread that calls ``run``.

    Args:
        target: whose methods are called.
        listener: a listening socket.
        key: what clients have to have.
    """

    def __init__(self, target: object, listener: socket.socket, key: bytes) -> None:
        self._target, self._listener, self._key = target, listener, key
        self._pool: ThreadPoolExecutor | None = None
        if getattr(target, "concurrent", False):
            self._pool = ThreadPoolExecutor(_MAX_THREADS, "calls")
        self._connections: dict[int, _Connection] = {}
        self._poll = select.poll()
        self._new: deque[socket.socket] = deque()
        self._strangers = threading.Semaphore(_MAX_STRANGERS)
        self._wake, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._poll.register(self._woken, select.POLLIN)

    def run(self) -> None:
        """Serves until the process ends."""
        threading.Thread(target=self._accept, name="connections", daemon=True).start()
        unread: deque[_Connection] = deque()
        while True:
            for descriptor, events in self._poll.poll(0 if unread else None):
                connection = self._connections.get(descriptor)
                if connection is None:
                    self._take_new()
                elif connection not in unread:
                    if events & select.POLLOUT:
                        self._send_on(connection)
                    if events & ~select.POLLOUT:
                        unread.append(connection)
            # One call of each that has some, in turn.
            for _ in range(len(unread)):
                connection = unread.popleft()
                if self._serve(connection):
                    unread.append(connection)

    def _accept(self) -> None:
        while True:
            sock, _ = self._listener.accept()
            self._strangers.acquire()
            threading.Thread(target=self._meet, args=[sock], daemon=True).start()

    def _meet(self, sock: socket.socket) -> None:
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            accept(sock, self._key)
        except (WireError, EOFError, OSError) as error:
            _log(f"refused a connection: {error}")
            sock.close()
            return
        finally:
            self._strangers.release()
        self._new.append(sock)
        self._wake.send(b"+")

    def _take_new(self) -> None:
        self._woken.recv(4096)
        while self._new:
            sock = self._new.popleft()
            self._connections[sock.fileno()] = _Connection(sock)
            self._poll.register(sock, select.POLLIN)

    def _serve(self, connection: _Connection) -> bool:
        """Answers one call, if it is there; returns whether there may be another."""
        try:
            frame = connection.reader.receive()
            if frame is None:
                return False
            if frame.kind != CALL:
                raise WireError("a client sends calls alone")
        except (WireError, EOFError, OSError) as error:
            self._drop(connection, error)
            return False
        if self._pool is not None:
            self._pool.submit(self._answer_beside, connection, frame)
        else:
            self._answer(connection, frame)
        return connection.reader.has_more

    def _answer(self, connection: _Connection, frame: Frame) -> None:
        out = self._outcome(frame)
        try:
            if not connection.send_now(out):
                out.keep()
                connection.backlog.append(out)
                self._poll.modify(connection.sock, select.POLLIN | select.POLLOUT)
        except OSError as error:
            self._drop(connection, error)

    def _answer_beside(self, connection: _Connection, frame: Frame) -> None:
        with contextlib.suppress(OSError):  # the client is gone; who reads finds it, too
            connection.send_wholly(self._outcome(frame))

    def _send_on(self, connection: _Connection) -> None:
        try:
            while connection.backlog and connection.backlog[0].send(connection.sock):
                connection.backlog.popleft()
            if not connection.backlog:
                self._poll.modify(connection.sock, select.POLLIN)
        except OSError as error:
            self._drop(connection, error)

    def _drop(self, connection: _Connection, error: Exception) -> None:
        if isinstance(error, WireError):
            _log(f"closed a connection: {error}")
        if self._connections.pop(connection.sock.fileno(), None) is not None:
            self._poll.unregister(connection.sock)
            with contextlib.suppress(OSError):
                connection.sock.shutdown(socket.SHUT_RDWR)  # wakes who sends
        connection.sock.close()

    def _called(self, frame: Frame) -> object:
        return method_of(self._target, frame.method)(frame.header, frame.buffers)

    def _outcome(self, frame: Frame) -> FrameWriter:
        try:
            header, buffers = encode_result(self._called(frame))
            return FrameWriter(ANSWER, frame.number, "", header, buffers)
        except BaseException as error:
            return error_frame(error, frame.number)


def method_of(target: object, name: str) -> Callable[..., Any]:
    """Returns a method that may be called.

    Raises:
        AttributeError: there is none.
    """
    if not name.startswith("_"):
        method: Callable[..., Any] | None = getattr(target, name, None)
        if callable(method):
            return method
    raise AttributeError(f"{type(target).__name__} has no method {name!r} that can be called")


def error_frame(error: BaseException, number: int = 0) -> FrameWriter:
    """Returns the frame that tells of an exception."""
    return FrameWriter(RAISED, number, "", *encode_error(error))


def encode_error(error: BaseException) -> tuple[Header, list[bytes]]:
    """Returns an exception in words, and its pickle if another process can read that."""
    content = {
        "type": type(error).__name__,
        "message": _text(error),
        "traceback": "".join(traceback.format_exception(error)),
    }
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)
    except Exception:
        return content, []
    return content, [pickled]


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return "(its text cannot be made)"


def encode_result(value: object) -> tuple[Header, list[Sendable]]:
    """Returns what a method has returned, as header and buffers.

    Raises:
        TypeError: it is something else.
    """
    if value is None:
        return {}, []
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], dict):
        return value[0], list(value[1])
    raise TypeError(
        f"an actor's method returns (header, buffers) or None, not {short_repr(value)}"
    )


def _log(line: str) -> None:
    print(f"mirror: {line}", file=sys.stderr, flush=True)
