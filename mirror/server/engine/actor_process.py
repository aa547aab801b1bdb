"""The process of an actor: its lifeline, and the loop that reads calls, runs them and replies.

The process reads its configuration from its lifeline, constructs the role, reports that it is
ready, and serves calls. It exits when its lifeline closes.

A lifeline is a pair of sockets between an actor, or a node agent, and its owner: the process that
started the actor. When one side ends, the kernel closes the socket, and the other side reads the
end of the stream. A message is JSON with its length in front.

An answer is sent before the next method runs, from the method's own memory. So a server may
return its values without a copy. But a client that does not read must not delay the others: after
a moment without progress, the rest of its answer is copied, and sent between other calls.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import json
import os
import pickle
import pkgutil
import random
import select
import socket
import struct
import sys
import threading
import traceback
import types
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import spawn
from time import monotonic, sleep
from typing import Any

import numpy as np

from mirror.errors import short_repr
from mirror.server.engine.channels import Channel, Deadline, receive, send
from mirror.server.engine.connection import decode_error
from mirror.server.engine.engine_types import Header, RemoteError, Sendable, WireError
from mirror.server.engine.frames import ANSWER, CALL, RAISED, Frame, FrameReader, FrameWriter
from mirror.server.engine.handshake import Credentials, Listener, actor_credentials
from mirror.server.engine.socket_client import register_key


def run_actor(lifeline: socket.socket, port: socket.socket) -> None:
    """Runs an actor in a process that was just forked, until its lifeline closes.

    Args:
        port: a listening socket; the actor accepts its clients there.
    """
    config = receive_message(lifeline)
    if config is None:
        return
    try:
        _prepare(config)
        target = resolve_role(config["role"])(**config["init"])
        credentials = actor_credentials(bytes.fromhex(config["key"]), config["address"])
        service = ServiceLoop(target, port, credentials)
    except BaseException as error:
        send_message(lifeline, failure_message(error))
        return
    start_vital_thread(functools.partial(_exit_on_eof, lifeline), "lifeline")
    send_message(lifeline, {"ready": True})
    service.run()


def _exit_on_eof(lifeline: socket.socket) -> None:
    receive_message(lifeline)
    exit_now(0)


def _prepare(config: dict[str, Any]) -> None:
    """Sets the process up as ``multiprocessing`` sets up one that it spawns."""
    register_key(config["address"]["id"], bytes.fromhex(config["key"]))
    os.environ.clear()
    os.environ.update(config["environ"])
    prepared = dict(config["prepared"])
    main = {key: prepared.pop(key) for key in tuple(prepared) if key.startswith("init_main")}
    spawn.prepare(prepared)
    # Every fork has the random states of the fork server, which are the same for all actors.
    random.seed()
    np.random.seed()
    sys.modules["__main__"] = _LazyMain(main)


class _LazyMain(types.ModuleType):
    """The owner's ``__main__``, which is run when one of its names is looked up.

    So a script needs its ``if __name__ == "__main__"`` only if an actor uses what it defines.
    """

    def __init__(self, prepared: dict[str, Any]) -> None:
        super().__init__("__main__")
        self._prepared, self._lock = prepared, threading.RLock()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("_prepared", "_lock"):
            raise AttributeError(name)
        with self._lock:
            prepared, self._prepared = self._prepared, {}
            if prepared:
                sys.modules["__main__"] = types.ModuleType("__main__")
                spawn.prepare(prepared)  # replaces the entry of sys.modules by the owner's module
                self.__dict__.update(vars(sys.modules["__main__"]))
        try:
            return self.__dict__[name]
        except KeyError:
            raise AttributeError(f"module '__main__' has no attribute {name!r}") from None


_LENGTH = struct.Struct("<I")
_MAX_BYTES = 64 << 20


def send_message(channel: Channel, content: dict[str, Any], seconds: float | None = None) -> None:
    """Sends a message.

    Raises:
        OSError: the other side has ended, or did not read within ``seconds``.
    """
    text = json.dumps(content).encode()
    send(channel, _LENGTH.pack(len(text)) + text, Deadline(seconds))


def receive_message(channel: Channel, seconds: float | None = None) -> dict[str, Any] | None:
    """Returns the next message, or None if the other side has ended.

    Raises:
        TimeoutError: it did not come within ``seconds``, if the channel does not block.
    """
    deadline = Deadline(seconds)
    try:
        size = _LENGTH.unpack(receive(channel, _LENGTH.size, deadline))[0]
        if size > _MAX_BYTES:
            return None
        content = json.loads(receive(channel, size, deadline))
    except TimeoutError:
        raise
    except (EOFError, OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def failure_message(error: BaseException) -> dict[str, Any]:
    """Returns the message that an actor's constructor raised an error."""
    if isinstance(error, RemoteError):  # a node agent forwards what the actor's process sent
        content = {
            "type": error.type_name,
            "message": error.message,
            "traceback": error.traceback,
        }
        pickled = [] if error.original is None else encode_error(error.original)[1]
    else:
        content, pickled = encode_error(error)
    return {"failed": content, "pickle": [data.hex() for data in pickled]}


def check_started(message: dict[str, Any]) -> None:
    """Raises RemoteError if a message says that the actor's constructor raised."""
    if "failed" in message:
        raise decode_error(message["failed"], [bytes.fromhex(t) for t in message["pickle"]])


PATIENCE_SECONDS = 0.03
_MAX_THREADS = 256
_STALL_SECONDS = 30.0  # a method that takes longer is reported, with the stacks


class ServiceLoop:
    """Answers the calls of an actor's clients, in the thread that calls ``run``.

    Args:
        target: the object with the methods to call.
        sock: a listening socket.
        credentials: what clients must prove.
    """

    def __init__(self, target: object, sock: socket.socket, credentials: Credentials) -> None:
        self._target = target
        self._listener = Listener(sock, credentials, self._deliver)
        self._pool: ThreadPoolExecutor | None = None
        if getattr(target, "concurrent", False):
            self._pool = ThreadPoolExecutor(_MAX_THREADS, "calls")
        self._connections: dict[int, _ClientConnection] = {}
        self._poll = select.poll()
        self._new: deque[Channel] = deque()
        self._call: tuple[str, float] | None = None  # the current method, and when it began
        self._wake, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._poll.register(self._woken, select.POLLIN)

    def run(self) -> None:
        """Serves calls until the process ends."""
        start_vital_thread(self._listener.run, "connections")
        start_vital_thread(self._report_stalls, "stalls")
        unread: deque[_ClientConnection] = deque()
        while True:
            for descriptor, events in self._poll.poll(0 if unread else None):
                connection = self._connections.get(descriptor)
                if connection is None:
                    self._add_new()
                elif connection not in unread:
                    if events & select.POLLOUT:
                        self._send_backlog(connection)
                    if events & ~select.POLLOUT:
                        unread.append(connection)
            # One call of each connection that has calls, in turn.
            for _ in range(len(unread)):
                connection = unread.popleft()
                if self._serve_call(connection):
                    unread.append(connection)

    def _deliver(self, channel: Channel) -> None:
        self._new.append(channel)
        self._wake.send(b"+")

    def _add_new(self) -> None:
        self._woken.recv(4096)
        while self._new:
            channel = self._new.popleft()
            self._connections[channel.fileno()] = _ClientConnection(channel)
            self._poll.register(channel, select.POLLIN)

    def _serve_call(self, connection: _ClientConnection) -> bool:
        """Answers one call, if it has arrived; returns whether another may be there."""
        try:
            frame = connection.reader.receive()
            if frame is None:
                return False
            if frame.kind != CALL:
                raise WireError("protocol error: a client sent a frame that is not a call")
        except Exception as error:  # a client's message ends only its own connection
            self._drop(connection, error)
            return False
        if self._pool is not None:
            self._pool.submit(self._answer_in_thread, connection, frame)
        else:
            self._answer(connection, frame)
        return connection.reader.has_more

    def _answer(self, connection: _ClientConnection, frame: Frame) -> None:
        out = self._execute(frame)
        try:
            if not connection.send_now(out):
                out.copy_rest()
                connection.backlog.append(out)
                self._poll.modify(connection.sock, select.POLLIN | select.POLLOUT)
        except OSError as error:
            self._drop(connection, error)

    def _answer_in_thread(self, connection: _ClientConnection, frame: Frame) -> None:
        with contextlib.suppress(OSError):  # the client is gone; the reading thread notices it
            connection.send_all(self._execute(frame))

    def _send_backlog(self, connection: _ClientConnection) -> None:
        try:
            while connection.backlog and connection.backlog[0].send(connection.sock):
                connection.backlog.popleft()
            if not connection.backlog:
                self._poll.modify(connection.sock, select.POLLIN)
        except OSError as error:
            self._drop(connection, error)

    def _drop(self, connection: _ClientConnection, error: Exception) -> None:
        if not isinstance(error, (EOFError, OSError)):
            text = str(error) or type(error).__name__
            print(f"mirror: closed a connection: {text}", file=sys.stderr, flush=True)
        if self._connections.pop(connection.sock.fileno(), None) is not None:
            self._poll.unregister(connection.sock)
            with contextlib.suppress(OSError):
                connection.sock.shutdown(socket.SHUT_RDWR)  # wakes a sending thread
        connection.sock.close()

    def _execute(self, frame: Frame) -> FrameWriter:
        """Runs the method of a call; returns the frame with its result or its error."""
        try:
            self._call = frame.method, monotonic()
            method = method_of(self._target, frame.method)
            header, buffers = encode_result(method(frame.header, frame.buffers))
            return FrameWriter(ANSWER, frame.number, "", header, buffers)
        except BaseException as error:
            return error_frame(error, frame.number)
        finally:
            self._call = None

    def _report_stalls(self) -> None:
        """Prints once per call that takes long what all threads do."""
        reported: object = None
        while True:
            sleep(_STALL_SECONDS / 4)
            call = self._call
            if call is None or call is reported or monotonic() - call[1] < _STALL_SECONDS:
                continue
            reported = call
            print(f"mirror: {call[0]} has run for {_STALL_SECONDS:g} s:", file=sys.stderr)
            faulthandler.dump_traceback(file=sys.stderr, all_threads=True)


class _ClientConnection:
    """A client's connection, in the actor's process, with the answers that it has not read yet."""

    def __init__(self, sock: Channel) -> None:
        self.sock = sock
        self.reader = FrameReader(sock)
        self.backlog: deque[FrameWriter] = deque()
        self.sending = threading.Lock()
        self.writable = select.poll()
        self.writable.register(sock, select.POLLOUT)

    def send_now(self, out: FrameWriter) -> bool:
        """Sends as long as the client reads; returns whether all of it is sent."""
        while not self.backlog:
            if out.send(self.sock):
                return True
            if not self.writable.poll(PATIENCE_SECONDS * 1e3):
                break
        return False

    def send_all(self, out: FrameWriter) -> None:
        """Waits until all of it is sent."""
        with self.sending:
            while not out.send(self.sock):
                self.writable.poll()


def start_vital_thread(function: Callable[[], None], name: str) -> None:
    """Starts a thread without which the process is of no use: if it raises, the process exits."""

    def run() -> None:
        try:
            function()
        except BaseException:
            traceback.print_exc()
            exit_now(1)

    threading.Thread(target=run, name=name, daemon=True).start()


def exit_now(code: int) -> None:
    """Flushes the output streams and exits, without running exit handlers."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def resolve_role(path: str) -> Any:
    """Returns the class with a dotted path, as ``package.module:Class``.

    Raises:
        ValueError: the path has another form.
        ImportError, AttributeError: the module or the class does not exist.
    """
    if ":" not in path:
        raise ValueError(f"a role is 'package.module:Class', not {short_repr(path)}")
    return pkgutil.resolve_name(path)


def method_of(target: object, name: str) -> Callable[..., Any]:
    """Returns a public method of an actor.

    Raises:
        AttributeError: there is no such method.
    """
    if not name.startswith("_"):
        method: Callable[..., Any] | None = getattr(target, name, None)
        if callable(method):
            return method
    raise AttributeError(f"{type(target).__name__} has no method {name!r} that can be called")


def error_frame(error: BaseException, number: int = 0) -> FrameWriter:
    """Returns the frame that reports an exception."""
    return FrameWriter(RAISED, number, "", *encode_error(error))


def encode_error(error: BaseException) -> tuple[Header, list[bytes]]:
    """Returns an exception as text, and its pickle if that can be read again."""
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
        return "(str() of this exception raised another exception)"


def encode_result(value: object) -> tuple[Header, list[Sendable]]:
    """Returns the result of a method as header and buffers.

    Raises:
        TypeError: the result is neither a pair of these nor None.
    """
    if value is None:
        return {}, []
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], dict):
        return value[0], list(value[1])
    raise TypeError(
        f"an actor's method returns (header, buffers) or None, not {short_repr(value)}"
    )
