"""A process's client of its fork server, and of the actors that were forked there.

One for the whole process, made when the first engine wants it, and anew when its fork server has
ended. One thread of it hears who has ended, and passes on what actors print.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from itertools import count
from typing import Any

from mirror.server.engine.child_output import ChildOutput
from mirror.server.engine.engine_types import ActorDied

_PROGRAM = """\
import sys
sys.path[:] = {path!r}
from mirror.server.engine.fork_server_main import main
main({descriptor}, {parent})
"""
_SIZE = 4096
_END_SECONDS = 5.0


class ForkedProcess:
    """A process forked from the fork server.

    Attributes:
        tether: its configuration goes there; the child ends when this is closed.
        code: its exit code, once it has ended; None if nobody knows it.
        ended: set once it has ended, and what it has printed has been passed on.
    """

    def __init__(
        self,
        tell: Callable[[dict[str, Any]], None],
        tether: socket.socket,
        outputs: list[ChildOutput],
    ) -> None:
        self.tether = tether
        self.pid = 0
        self.code: int | None = None
        self.ended = threading.Event()
        self.forked = threading.Event()
        self.outputs = outputs
        self._tell = tell
        self._callbacks: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    def begin_kill(self) -> None:
        """Asks the fork server to, which alone knows whose number a process's still is."""
        self.forked.wait()
        self._tell({"kill": self.pid})

    def kill(self) -> None:
        """Ends it and waits until it has ended."""
        self.begin_kill()
        self.ended.wait()

    def on_end(self, callback: Callable[[], None]) -> None:
        """Has a function called, in a thread of its own, when it has ended."""
        with self._lock:
            if not self.ended.is_set():
                self._callbacks.append(callback)
                return
        threading.Thread(target=callback, daemon=True).start()

    def note_end(self, code: int | None) -> None:
        """Notes that it has ended, and tells who wants to know."""
        for output in self.outputs:
            output.finish()
        self.code = code
        self.tether.close()
        self.forked.set()
        with self._lock:
            self.ended.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            threading.Thread(target=callback, daemon=True).start()


class ForkServer:
    """A fork server of this process."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            descriptor = theirs.fileno()
            program = _PROGRAM.format(path=sys.path, descriptor=descriptor, parent=os.getpid())
            self._process = subprocess.Popen(
                [sys.executable, "-c", program], stdin=subprocess.DEVNULL, pass_fds=[descriptor]
            )
        self.pid = self._process.pid
        self._owner = os.getpid()
        self._control = ours
        self._lock = threading.Lock()
        self._numbers = count()
        self._waiting: dict[int, ForkedProcess] = {}
        self._children: dict[int, ForkedProcess] = {}
        self._is_ended = False
        self._woken, self._wake = os.pipe()
        self._thread = threading.Thread(target=self._receive, name="actors", daemon=True)
        self._thread.start()

    @property
    def is_usable(self) -> bool:
        """Whether it can have children, in this process."""
        return not self._is_ended and self._owner == os.getpid()

    def fork(self, name: str) -> ForkedProcess:
        """Returns a new process, which waits for its configuration."""
        ours, theirs = socket.socketpair()
        pipes = {stream: os.pipe() for stream in ("stdout", "stderr")}
        outputs = [ChildOutput(name, stream, read) for stream, (read, _) in pipes.items()]
        child = ForkedProcess(self._send, ours, outputs)
        passed = [theirs.fileno(), *(write for _, write in pipes.values())]
        with self._lock:
            number = next(self._numbers)
            if not self._is_ended:
                self._waiting[number] = child
                try:
                    message = json.dumps({"fork": number}).encode()
                    socket.send_fds(self._control, [message], passed)
                except OSError:
                    pass  # the thread hears of it
            else:
                child.note_end(None)
        theirs.close()
        for _, write in pipes.values():
            os.close(write)
        os.write(self._wake, b"+")
        try:
            child.forked.wait()
        except BaseException:
            ours.close()  # so that it ends as soon as it begins
            raise
        if child.ended.is_set() and not child.pid:
            raise ActorDied(name, "the process that starts actors has ended")
        return child

    def _send(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # its children end with it
            self._control.send(json.dumps(message).encode())

    def close(self) -> None:
        """Ends the fork server, and with it all children."""
        if self._owner != os.getpid():
            return
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._thread.join(_END_SECONDS)

    def _receive(self) -> None:
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(self._woken, select.POLLIN)
        known: dict[int, ChildOutput] = {}
        while True:
            for descriptor, _ in poll.poll():
                if descriptor == self._woken:
                    os.read(self._woken, _SIZE)
                elif descriptor in known:
                    if not known[descriptor].pass_on():
                        poll.unregister(descriptor)
                        del known[descriptor]
                elif not self._take():
                    self._end()
                    return
            with self._lock:
                children = [*self._waiting.values(), *self._children.values()]
            outputs = [output for child in children for output in child.outputs]
            fresh = {o.descriptor: o for o in outputs if o.descriptor is not None}
            for gone in known.keys() - fresh.keys():
                poll.unregister(gone)
            for descriptor in fresh.keys() - known.keys():
                poll.register(descriptor, select.POLLIN)
            known = fresh

    def _take(self) -> bool:
        try:
            packet = self._control.recv(_SIZE)
        except OSError:
            return False
        if not packet:
            return False
        message: dict[str, Any] = json.loads(packet)
        if "forked" in message:
            child = self._waiting.pop(message["forked"])
            child.pid = message["pid"]
            self._children[child.pid] = child
            child.forked.set()
        else:
            self._children.pop(message["ended"]).note_end(message["code"])
        return True

    def _end(self) -> None:
        with self._lock:
            self._is_ended = True
            left = [*self._waiting.values(), *self._children.values()]
            self._waiting.clear()
            self._children.clear()
        for child in left:
            child.note_end(None)
        self._control.close()


_lock = threading.Lock()
_fork_server: ForkServer | None = None


def fork_server() -> ForkServer:
    """Returns this process's, which may still be importing torch."""
    global _fork_server
    with _lock:
        if _fork_server is None or not _fork_server.is_usable:
            _fork_server = ForkServer()
            atexit.register(_fork_server.close)
        return _fork_server
