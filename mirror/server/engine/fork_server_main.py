"""The fork server: a process that has imported torch and mirror, and forks into actors.

It has only one thread, since a fork copies only the thread that calls it. A process starts one
fork server for all its engines. Messages are JSON in packets::

    {"fork": 7}, and lifeline, port, stdout, stderr     {"forked": 7, "pid": 4711}
    {"kill": 4711}                                      {"ended": 4711, "code": -9}

When the process that started it ends, the fork server ends, and all actors with it.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
from typing import Any

from mirror.server.engine import actor_process
from mirror.server.engine.service_loop import exit_now

_PACKET_BYTES = 4096
# The parent may end while a fork of the parent keeps the connection open.
_PARENT_CHECK_SECONDS = 1.0
_PR_SET_PDEATHSIG = 1


def main(descriptor: int, parent: int) -> None:
    """Serves the process at the other end of a connection, until that process ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this one
    control = socket.socket(fileno=descriptor)
    importlib.import_module("mirror")
    _import_optimizers()
    gc.collect()
    gc.freeze()  # keeps memory shared with forks: a collection would write to every object
    ForkServerMain(control, parent).run()


def _import_optimizers() -> None:
    import torch

    # Constructing an optimizer imports modules that ``import torch`` does not.
    torch.optim.SGD([torch.zeros(1)], lr=0.1)


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
