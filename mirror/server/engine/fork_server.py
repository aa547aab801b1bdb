"""The fork server: a process that has imported torch and mirror, and forks into actors.

A process has one fork server for all its engines. It starts with the first engine, and again if it
has ended. ``ForkServer`` is its owner's side: one thread receives the ends of the forked
processes, and forwards their output line by line, with the actor's name in front. The process
itself is ``ForkServerMain``. It has only one thread, since a fork copies only the thread that
calls it. Messages are JSON in packets::

    {"fork": 7}, and lifeline, port, stdout, stderr     {"forked": 7, "pid": 4711}
    {"kill": 4711}                                      {"ended": 4711, "code": -9}

When the process that started it ends, the fork server ends, and all actors with it.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from itertools import count
from typing import Any

from mirror.server.engine import actor_process
from mirror.server.engine.actor_process import exit_now
from mirror.server.engine.engine_types import ActorDied
from mirror.server.engine.socket_client import environment_without_key

_PROGRAM = """\
import sys
sys.path[:] = {path!r}
from mirror.server.engine.fork_server import main
main({descriptor}, {parent})
"""
_PACKET_BYTES = 4096
_CLOSE_SECONDS = 5.0
_START_SECONDS = 600.0  # the first fork waits until the fork server has imported torch
_READ_BYTES = 1 << 16
_MAX_LINE_BYTES = 1 << 16


_lock = threading.Lock()
_fork_server: ForkServer | None = None


def fork_server() -> ForkServer:
    """Returns this process's fork server, which may still be importing torch."""
    global _fork_server
    with _lock:
        if _fork_server is None or not _fork_server.is_usable:
            _fork_server = ForkServer()
            atexit.register(_fork_server.close)
        return _fork_server


class ForkServer:
    """A fork server of this process.

    It sends requests over a control connection; see ``ForkServerMain``. ``_waiting`` has the
    children that are not forked yet, by request number; ``_children`` has the others, by pid.
    """

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            descriptor = theirs.fileno()
            program = _PROGRAM.format(path=sys.path, descriptor=descriptor, parent=os.getpid())
            self._process = subprocess.Popen(
                [sys.executable, "-c", program],
                stdin=subprocess.DEVNULL,
                pass_fds=[descriptor],
                env=environment_without_key(),
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
        """Whether this process can fork with it: it runs, and belongs to no parent process."""
        return not self._is_ended and self._owner == os.getpid()

    def fork(self, name: str, port: socket.socket) -> ForkedProcess:
        """Returns a new process, which waits for its configuration and inherits a socket.

        Raises:
            ActorDied: the fork server has ended, or does not answer.
        """
        ours, theirs = socket.socketpair()
        pipes = {stream: os.pipe() for stream in ("stdout", "stderr")}
        outputs = [ChildOutput(name, stream, read) for stream, (read, _) in pipes.items()]
        ours.setblocking(False)
        child = ForkedProcess(self, ours, outputs)
        passed = [theirs.fileno(), port.fileno(), *(write for _, write in pipes.values())]
        with self._lock:
            number = next(self._numbers)
            if not self._is_ended:
                self._waiting[number] = child
                try:
                    message = json.dumps({"fork": number}).encode()
                    socket.send_fds(self._control, [message], passed)
                except OSError:
                    pass  # the receiving thread notices it
            else:
                child.record_end(None)
        theirs.close()
        for _, write in pipes.values():
            os.close(write)
        os.write(self._wake, b"+")
        try:
            if not child.forked.wait(_START_SECONDS):
                self.kill()
                child.forked.wait()
        except BaseException:
            ours.close()  # the child exits when it reads the end of its lifeline
            raise
        if child.ended.is_set() and not child.pid:
            raise ActorDied(name, "the process that starts actors has ended")
        return child

    def kill(self) -> None:
        """Kills the fork server, if it does not answer; the kernel kills its children."""
        self._process.kill()

    def send(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the fork server has ended, and its children with it
            self._control.send(json.dumps(message).encode(), socket.MSG_DONTWAIT)

    def close(self) -> None:
        """Ends the fork server and all its children."""
        if self._owner != os.getpid():
            return
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)
        try:
            self._process.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._thread.join(_CLOSE_SECONDS)

    def _receive(self) -> None:
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(self._woken, select.POLLIN)
        polled: dict[int, ChildOutput] = {}
        while True:
            for descriptor, _ in poll.poll():
                if descriptor == self._woken:
                    os.read(self._woken, _PACKET_BYTES)
                elif descriptor in polled:
                    if not polled[descriptor].forward():
                        poll.unregister(descriptor)
                        del polled[descriptor]
                elif not self._receive_packet():
                    self._end()
                    return
            with self._lock:
                children = [*self._waiting.values(), *self._children.values()]
            outputs = [output for child in children for output in child.outputs]
            current = {o.descriptor: o for o in outputs if o.descriptor is not None}
            for descriptor in polled.keys() - current.keys():
                poll.unregister(descriptor)
            for descriptor in current.keys() - polled.keys():
                poll.register(descriptor, select.POLLIN)
            polled = current

    def _receive_packet(self) -> bool:
        """Handles one message; returns whether the fork server still runs."""
        try:
            packet = self._control.recv(_PACKET_BYTES)
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
            self._children.pop(message["ended"]).record_end(message["code"])
        return True

    def _end(self) -> None:
        with self._lock:
            self._is_ended = True
            children = [*self._waiting.values(), *self._children.values()]
            self._waiting.clear()
            self._children.clear()
        for child in children:
            child.record_end(None)
        self._control.close()


class ForkedProcess:
    """A process forked from the fork server.

    Attributes:
        lifeline: receives its configuration; the process exits when this is closed.
        code: its exit code once it has ended, or None if the fork server ended first.
        forked: set when it has a ``pid``, or has ended without one.
        ended: set when it has ended and its output is forwarded.
    """

    def __init__(
        self, server: ForkServer, lifeline: socket.socket, outputs: list[ChildOutput]
    ) -> None:
        self.lifeline = lifeline
        self.pid = 0
        self.code: int | None = None
        self.ended = threading.Event()
        self.forked = threading.Event()
        self.outputs = outputs
        self._server = server
        self._callbacks: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    def begin_kill(self) -> None:
        """Asks the fork server to kill it: only there is the pid safe from reuse."""
        self.forked.wait()
        self._server.send({"kill": self.pid})

    def kill(self) -> None:
        """Kills it, and waits until it has ended."""
        self.begin_kill()
        if not self.ended.wait(_CLOSE_SECONDS):
            self._server.kill()
            self.ended.wait()

    def on_end(self, callback: Callable[[], None]) -> None:
        """Calls a function, in a new thread, when the process has ended."""
        with self._lock:
            if not self.ended.is_set():
                self._callbacks.append(callback)
                return
        threading.Thread(target=callback, daemon=True).start()

    def record_end(self, code: int | None) -> None:
        """Records that the process has ended, and calls the functions of ``on_end``."""
        for output in self.outputs:
            output.finish()
        self.code = code
        self.lifeline.close()
        self.forked.set()
        with self._lock:
            self.ended.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            threading.Thread(target=callback, daemon=True).start()


class ChildOutput:
    """A pipe that forwards one of an actor's output streams to this process's stream.

    Args:
        stream: "stdout" or "stderr"; a line goes to the ``sys`` attribute's current value.
        descriptor: the pipe's read end; closed at the end of the stream.
    """

    def __init__(self, name: str, stream: str, descriptor: int) -> None:
        self._name, self._stream = name, stream
        self.descriptor: int | None = descriptor
        self._rest = b""
        os.set_blocking(descriptor, False)

    def forward(self) -> bool:
        """Forwards the lines that have arrived; returns whether more may come."""
        while self.descriptor is not None:
            try:
                data = os.read(self.descriptor, _READ_BYTES)
            except BlockingIOError:
                return True
            except OSError:
                data = b""
            if not data:
                self._close()
                return False
            *lines, self._rest = (self._rest + data).split(b"\n")
            if len(self._rest) > _MAX_LINE_BYTES:
                lines, self._rest = [*lines, self._rest], b""
            self._print(lines)
        return False

    def finish(self) -> None:
        """Forwards the rest, and closes the pipe even if another process still has it open."""
        if self.forward():
            self._close()

    def _close(self) -> None:
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None
        if self._rest:
            self._print([self._rest])
            self._rest = b""

    def _print(self, lines: list[bytes]) -> None:
        if not lines:
            return
        text = "".join(f"[{self._name}] {line.decode(errors='replace')}\n" for line in lines)
        try:
            stream = getattr(sys, self._stream)
            stream.write(text)
            stream.flush()
        except (AttributeError, OSError, ValueError):
            pass  # this process has no such stream any more


# The parent may end while a fork of the parent keeps the connection open.
_PARENT_CHECK_SECONDS = 1.0
_PR_SET_PDEATHSIG = 1


def main(descriptor: int, parent: int) -> None:
    """Serves the process at the other end of a connection, until that process ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this one
    control = socket.socket(fileno=descriptor)
    importlib.import_module("mirror")
    import torch

    # Constructing an optimizer imports modules that ``import torch`` does not.
    torch.optim.SGD([torch.zeros(1)], lr=0.1)
    gc.collect()
    gc.freeze()  # keeps memory shared with forks: a collection would write to every object
    ForkServerMain(control, parent).run()


class ForkServerMain:
    """Forks, and reports which children have ended."""

    def __init__(self, control: socket.socket, parent: int) -> None:
        self._control, self._parent = control, parent
        self._pids: set[int] = set()
        self._libc = ctypes.CDLL(None)
        self._wake, self._woken = socket.socketpair()
        for end in (self._wake, self._woken):
            end.setblocking(False)

    def run(self) -> None:
        """Serves requests until the owner ends."""
        signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(self._woken, select.POLLIN)
        while os.getppid() == self._parent:
            for descriptor, _ in poll.poll(_PARENT_CHECK_SECONDS * 1e3):
                if descriptor == self._woken.fileno():
                    self._woken.recv(_PACKET_BYTES)
                    self._reap()
                elif not self._handle_request():
                    self._end()
                    return
        self._end()

    def _handle_request(self) -> bool:
        """Handles one message; returns whether the owner still runs."""
        try:
            packet, ancillary, _, _ = self._control.recvmsg(
                _PACKET_BYTES, socket.CMSG_SPACE(4 * 4)
            )
        except ConnectionError:
            return False
        if not packet:
            return False
        message = json.loads(packet)
        if "kill" in message:
            if message["kill"] in self._pids:
                os.kill(message["kill"], signal.SIGKILL)
        else:
            descriptors = array.array("i")
            for _, _, data in ancillary:
                descriptors.frombytes(data)
            self._fork(message["fork"], list(descriptors))
        return True

    def _fork(self, number: int, descriptors: list[int]) -> None:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                self._become_actor(*descriptors)
                code = 0
            finally:
                exit_now(code)
        self._pids.add(pid)
        for descriptor in descriptors:
            os.close(descriptor)
        self._send({"forked": number, "pid": pid})

    def _become_actor(self, lifeline: int, port: int, stdout: int, stderr: int) -> None:
        server = os.getppid()
        self._libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != server:
            return  # the fork server ended before prctl was called
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for end in (self._control, self._wake, self._woken):
            end.close()
        with open(os.devnull) as nothing:
            os.dup2(nothing.fileno(), 0)
        for descriptor, standard in ((stdout, 1), (stderr, 2)):
            os.dup2(descriptor, standard)
            os.close(descriptor)
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        actor_process.run_actor(socket.socket(fileno=lifeline), socket.socket(fileno=port))

    def _reap(self) -> None:
        for pid in tuple(self._pids):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                self._pids.remove(pid)
                self._send({"ended": pid, "code": os.waitstatus_to_exitcode(status)})

    def _send(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # run() notices the owner's end
            self._control.send(json.dumps(message).encode())

    def _end(self) -> None:
        for pid in self._pids:
            os.kill(pid, signal.SIGKILL)
        for pid in self._pids:
            os.waitpid(pid, 0)
