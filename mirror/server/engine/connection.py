"""A client's connection to an actor: calls from several threads, and their answers.

No separate thread reads answers, since waking another thread takes longer than a whole call.
Instead the first thread in ``Reply.result`` reads. It settles the replies of other threads on the
way, and leaves when its own has arrived; then one of the threads that still wait reads on. If no
thread reads, the actor is not blocked: see ``ServiceLoop``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import select
import socket
import threading
from collections.abc import Sequence
from time import monotonic
from typing import Any, Protocol

from mirror.server.engine.channels import Channel
from mirror.server.engine.engine_types import (
    ActorDied,
    Answer,
    Array,
    Header,
    RemoteError,
    Sendable,
    WireError,
)
from mirror.server.engine.frames import ANSWER, CALL, RAISED, Frame, FrameReader, FrameWriter, Spec

_WARNING_SECONDS = 30.0  # a wait for an answer that takes longer is logged

_logger = logging.getLogger("mirror")


class Reply:
    """The future of a call; without a connection, it has failed already."""

    __slots__ = ("_answer", "_connection", "_error", "into", "is_done")

    def __init__(self, connection: Connection | None, into: Sequence[Array] | None = None) -> None:
        self.into = into
        self.is_done = connection is None
        self._connection = connection
        self._answer: Answer | None = None
        self._error: Exception | None = None

    def result(self, timeout: float | None = None) -> Answer:
        """Waits for the answer and returns it; see ``Future``."""
        if not self.is_done and self._connection is not None:
            self._connection.wait(self, timeout)
        if self._error is not None:
            raise self._error
        assert self._answer is not None
        return self._answer

    def done(self) -> bool:
        """Returns whether the answer has arrived, or the call has failed."""
        if not self.is_done and self._connection is not None:
            self._connection.poll(self)
        return self.is_done

    def settle(self, frame: Frame) -> None:
        """Stores the answer of the call."""
        if frame.kind == RAISED:
            self._error = decode_error(frame.header, frame.buffers)
        else:
            self._answer = frame.header, frame.buffers
        self._end()

    def fail(self, error: Exception) -> None:
        """Stores the reason why no answer will come."""
        self._error = error
        self._end()

    def _end(self) -> None:
        self.into = None
        self.is_done = True
        self._connection = None


def failed_reply(error: Exception) -> Reply:
    """Returns the future of a call that could not be sent."""
    reply = Reply(None)
    reply.fail(error)
    return reply


class Stallable(Protocol):
    """The members of an actor's client that a connection uses."""

    name: str
    timeout_seconds: float | None

    def confirm_death(self) -> None:
        """Is called before calls fail because the actor has died."""

    def end_stalled(self) -> None:
        """Is called when a call has taken ``timeout_seconds``, before it fails."""

    def state(self) -> str:
        """Returns what is known of the actor's process, for a warning."""


class Connection:
    """A connection after its handshake.

    Args:
        sock: closed with the connection.
        client: the actor's client: its name, and what it does if the actor stalls or has died.
    """

    def __init__(self, sock: Channel, client: Stallable) -> None:
        self._sock, self._client, self._name = sock, client, client.name
        self._reader = FrameReader(sock, self._allocate)
        self._pending: dict[int, Reply] = {}
        self._number = 0
        self._error: Exception | None = None
        self._pid = os.getpid()
        self._sending = threading.Lock()
        self._changed = threading.Condition()
        self._is_reading = False  # a thread reads
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(sock, select.POLLIN)
        self._writable.register(sock, select.POLLOUT)

    @property
    def is_usable(self) -> bool:
        """Whether calls can use it: it is open, and was not inherited by a fork."""
        return self._error is None and self._pid == os.getpid()

    def call(
        self,
        method: str,
        header: Header,
        buffers: Sequence[Sendable],
        into: Sequence[Array] | None,
    ) -> Reply:
        """Sends a call and returns its future; see ``ActorClient.call``."""
        reply = Reply(self, into)
        with self._sending:
            self._number = number = self._number + 1
            out = FrameWriter(CALL, number, method, header, buffers)
            if self._error is not None:
                return failed_reply(self._error)
            self._pending[number] = reply
            try:
                while not out.send(self._sock):
                    seconds = self._client.timeout_seconds
                    if not self._writable.poll(None if seconds is None else seconds * 1e3):
                        self._end_stalled(f"{self._name} has read nothing within {seconds:g} s")
                        break
            except OSError as error:
                self.end(ActorDied(self._name, f"its process has ended ({error})"))
            except BaseException:
                # After half a frame, the actor could not find the start of the next one.
                self.end(WireError(f"{self._name}: sending a call was interrupted"))
                raise
        return reply

    def wait(self, reply: Reply, timeout: float | None) -> None:
        """Waits until a call is done, and reads answers meanwhile.

        Raises:
            TimeoutError: no answer came within ``timeout`` seconds.
        """
        seconds = self._client.timeout_seconds if timeout is None else timeout
        deadline = None if seconds is None else monotonic() + seconds
        with self._changed:
            while self._is_reading and not reply.is_done:
                if not self._changed.wait(_remaining(deadline)):
                    break
            if reply.is_done:
                return
            is_reader = not self._is_reading
            self._is_reading = True
        is_done = False
        if is_reader:
            try:
                is_done = self._read(reply, deadline)
            finally:
                with self._changed:
                    self._is_reading = False
                    if self._pending:
                        self._changed.notify_all()
        if is_done:
            return
        late = f"{self._name} has not answered within {seconds:g} s"
        if timeout is not None:
            raise TimeoutError(late)
        self._end_stalled(late)
        with self._changed:  # the thread that reads fails all replies
            self._changed.wait_for(lambda: reply.is_done)

    def _end_stalled(self, late: str) -> None:
        _logger.warning("%s: it counts as lost (timeout_seconds)%s", late, self._client.state())
        self._client.end_stalled()
        self.end(ActorDied(self._name, f"{late}, the limit for a call (timeout_seconds)"))

    def poll(self, reply: Reply) -> None:
        """Reads what has arrived, unless another thread is reading."""
        with self._changed:
            if self._is_reading:
                return
        with contextlib.suppress(TimeoutError):
            self.wait(reply, 0)

    def end(self, error: Exception) -> None:
        """Closes the connection; calls that are not done fail with the error."""
        if isinstance(error, ActorDied):
            self._client.confirm_death()
        if self._error is None:
            self._error = error
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # wakes the reading thread
        if not self._is_reading:
            self._fail()

    def _fail(self) -> None:
        assert self._error is not None
        while self._pending:
            try:
                _, reply = self._pending.popitem()
            except KeyError:
                break
            reply.fail(self._error)
        self._sock.close()
        with self._changed:
            self._changed.notify_all()

    def __del__(self) -> None:
        self._sock.close()

    def _read(self, reply: Reply, deadline: float | None) -> bool:
        """Reads until a call is done; returns False if the deadline passed first."""
        try:
            while not reply.is_done:
                if not self._reader.has_more and not self._poll_until(deadline):
                    return reply.is_done
                frame = self._reader.receive()
                if frame is not None:
                    self._settle(frame, reply)
        except (EOFError, OSError) as error:
            self.end(ActorDied(self._name, f"its process has ended ({error})"))
            self._fail()
        except WireError as error:
            self.end(error)
            self._fail()
        return True

    def _poll_until(self, deadline: float | None) -> bool:
        seconds = _remaining(deadline)
        if seconds is None or seconds > _WARNING_SECONDS:
            if self._readable.poll(_WARNING_SECONDS * 1e3):
                return True
            _logger.warning(
                "waiting for %s: it has answered nothing for %g s%s",
                self._name,
                _WARNING_SECONDS,
                self._client.state(),
            )
            seconds = _remaining(deadline)
        return bool(self._readable.poll(None if seconds is None else seconds * 1e3))

    def _settle(self, frame: Frame, wanted: Reply) -> None:
        reply = self._pending.pop(frame.number, None)
        if reply is None or frame.kind not in (ANSWER, RAISED):
            raise WireError(f"protocol error: {self._name} replied to an unknown request")
        reply.settle(frame)
        if reply is not wanted:
            with self._changed:
                self._changed.notify_all()

    def _allocate(self, number: int, specs: Sequence[Spec]) -> list[Array] | None:
        reply = self._pending.get(number)
        into = None if reply is None else reply.into
        if into is None or len(into) != len(specs):
            return None
        fits = all(
            (array.dtype, array.shape) == spec for array, spec in zip(into, specs, strict=True)
        )
        return list(into) if fits else None


def _remaining(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - monotonic())


def decode_error(content: Header, pickled: Sequence[Any]) -> RemoteError:
    """Returns the error that ``encode_error`` encoded, with the original if it can be rebuilt."""
    original = None
    if pickled:
        try:
            original = pickle.loads(pickled[0])
        except Exception:  # this process lacks its class, or the constructor differs
            original = None
    if not isinstance(original, BaseException):
        original = None
    kind, message, trace = (str(content.get(key)) for key in ("type", "message", "traceback"))
    return RemoteError(kind, message, trace, original)
