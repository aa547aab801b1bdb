"""A connection to an actor, as its clients use it: calls from several threads, and their answers.

[Note: Who reads]
No thread waits for answers but those that want one: to wake another takes longer than the whole
call. The first thread in ``Pending.result`` reads, hands other threads theirs, and goes with its
own; then one of those that still wait reads on. An actor does not depend on it that somebody
reads: see [Note: Slow readers].
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import socket
import threading
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

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


class Reply:
    """A future whose answer comes over a link, or that has failed already."""

    __slots__ = ("_answer", "_error", "_link", "into", "is_done")

    def __init__(self, link: Connection | None, into: Sequence[Array] | None = None) -> None:
        self.into = into
        self.is_done = link is None
        self._link = link
        self._answer: Answer | None = None
        self._error: Exception | None = None

    def result(self, timeout: float | None = None) -> Answer:
        """Waits for the answer; see ``Future``."""
        if not self.is_done and self._link is not None:
            self._link.wait(self, timeout)
        if self._error is not None:
            raise self._error
        assert self._answer is not None
        return self._answer

    def done(self) -> bool:
        """Returns whether there is an answer, or none will come."""
        if not self.is_done and self._link is not None:
            self._link.poll(self)
        return self.is_done

    def settle(self, frame: Frame) -> None:
        """Takes its answer."""
        if frame.kind == RAISED:
            self._error = remote_error(frame.header, frame.buffers)
        else:
            self._answer = frame.header, frame.buffers
        self._end()

    def fail(self, error: Exception) -> None:
        """Takes the reason why there is no answer."""
        self._error = error
        self._end()

    def _end(self) -> None:
        self.into = None
        self.is_done = True
        self._link = None


def failed(error: Exception) -> Reply:
    """Returns a future of a call that could not be begun."""
    pending = Reply(None)
    pending.fail(error)
    return pending


class Connection:
    """One connection, past the handshake.

    Args:
        sock: is closed with the link.
        name: the actor's, for errors.
        confirm: called before anybody is told that the actor has died.
    """

    def __init__(
        self, sock: socket.socket, name: str, confirm: Callable[[], object] | None = None
    ) -> None:
        self._sock, self._name, self._confirm = sock, name, confirm
        self._reader = FrameReader(sock, self._place)
        self._pending: dict[int, Reply] = {}
        self._number = 0
        self._error: Exception | None = None
        self._pid = os.getpid()
        self._sending = threading.Lock()
        self._changed = threading.Condition()
        self._is_read = False  # by some thread
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(sock, select.POLLIN)
        self._writable.register(sock, select.POLLOUT)

    @property
    def is_usable(self) -> bool:
        """Whether calls can go over it: it stands, and no fork has it from another process."""
        return self._error is None and self._pid == os.getpid()

    def call(
        self,
        method: str,
        header: Header,
        buffers: Sequence[Sendable],
        into: Sequence[Array] | None,
    ) -> Reply:
        """Sends a call."""
        pending = Reply(self, into)
        with self._sending:
            self._number = number = self._number + 1
            out = FrameWriter(CALL, number, method, header, buffers)
            if self._error is not None:
                return failed(self._error)
            self._pending[number] = pending
            try:
                while not out.send(self._sock):
                    self._writable.poll()
            except OSError as error:
                self.end(ActorDied(self._name, f"its process has ended ({error})"))
            except BaseException:
                # Half a frame is no beginning of another.
                self.end(WireError(f"{self._name}: sending a call was interrupted"))
                raise
        return pending

    def wait(self, pending: Reply, timeout: float | None) -> None:
        """Waits until a call is done, reading for all who wait; see [Note: Who reads].

        Raises:
            TimeoutError: it took longer.
        """
        deadline = None if timeout is None else monotonic() + timeout
        with self._changed:
            while self._is_read and not pending.is_done:
                if not self._changed.wait(_remaining(deadline)):
                    raise TimeoutError(f"{self._name} has not answered within {timeout:g} s")
            if pending.is_done:
                return
            self._is_read = True
        try:
            if not self._read(pending, deadline):
                raise TimeoutError(f"{self._name} has not answered within {timeout:g} s")
        finally:
            with self._changed:
                self._is_read = False
                if self._pending:
                    self._changed.notify_all()

    def poll(self, pending: Reply) -> None:
        """Reads what has come, if nobody does."""
        with self._changed:
            if self._is_read:
                return
        with contextlib.suppress(TimeoutError):
            self.wait(pending, 0)

    def end(self, error: Exception) -> None:
        """Closes the connection, and has all calls fail that are not done."""
        if self._confirm is not None and isinstance(error, ActorDied):
            self._confirm()
        if self._error is None:
            self._error = error
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # wakes who reads
        if not self._is_read:
            self._fail()

    def _fail(self) -> None:
        assert self._error is not None
        while self._pending:
            try:
                _, pending = self._pending.popitem()
            except KeyError:
                break
            pending.fail(self._error)
        self._sock.close()
        with self._changed:
            self._changed.notify_all()

    def __del__(self) -> None:
        self._sock.close()

    def _read(self, pending: Reply, deadline: float | None) -> bool:
        """Reads until a call is done; returns False if the deadline came first."""
        try:
            while not pending.is_done:
                if not self._reader.has_more and not self._polled(deadline):
                    return pending.is_done
                frame = self._reader.receive()
                if frame is not None:
                    self._settle(frame, pending)
        except (EOFError, OSError) as error:
            self.end(ActorDied(self._name, f"its process has ended ({error})"))
            self._fail()
        except WireError as error:
            self.end(error)
            self._fail()
        return True

    def _polled(self, deadline: float | None) -> bool:
        left = _remaining(deadline)
        return bool(self._readable.poll(None if left is None else left * 1e3))

    def _settle(self, frame: Frame, wanted: Reply) -> None:
        pending = self._pending.pop(frame.number, None)
        if pending is None or frame.kind not in (ANSWER, RAISED):
            raise WireError(f"{self._name} answers what nobody has asked")
        pending.settle(frame)
        if pending is not wanted:
            with self._changed:
                self._changed.notify_all()

    def _place(self, number: int, specs: Sequence[Spec]) -> list[Array] | None:
        pending = self._pending.get(number)
        into = None if pending is None else pending.into
        if into is None or len(into) != len(specs):
            return None
        fits = all(
            (array.dtype, array.shape) == spec for array, spec in zip(into, specs, strict=True)
        )
        return list(into) if fits else None


def _remaining(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - monotonic())


def remote_error(content: Header, pickled: Sequence[Any]) -> RemoteError:
    """Returns what an actor tells of an exception, with the exception if it can be rebuilt."""
    original = None
    if pickled:
        try:
            original = pickle.loads(pickled[0])
        except Exception:  # of a class that is not known here, or whose constructor differs
            original = None
    if not isinstance(original, BaseException):
        original = None
    kind, message, trace = (str(content.get(key)) for key in ("type", "message", "traceback"))
    return RemoteError(kind, message, trace, original)
