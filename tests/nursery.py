"""A process with torch imported that forks when asked: the workers of tests/crew.py.

To start Python, and to import torch, takes seconds of a processor; a fork takes a hundredth.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

ROOT = Path(__file__).parents[1]
LARGEST = 1 << 20  # bytes of a request: an environment


@dataclass(frozen=True)
class Child:
    """A fork: what it reads as its standard input, and writes as its standard output."""

    pid: int
    stdin: BinaryIO
    stdout: BinaryIO


class Nursery:
    """The process; it starts with the first child, and ends with this one."""

    def __init__(self) -> None:
        self._asked: socket.socket | None = None

    def start(self, environ: Mapping[str, str]) -> Child:
        """Returns a new fork, with that environment, in which ``tests.crew.serve`` runs."""
        if self._asked is None:
            self._asked, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                process = subprocess.Popen(
                    [sys.executable, "-m", "tests.nursery", str(theirs.fileno())],
                    env={**os.environ, **environ},
                    stdin=subprocess.DEVNULL,
                    cwd=ROOT,
                    pass_fds=[theirs.fileno()],
                )
            atexit.register(_end, self._asked, process)
        (theirs_in, ours_in), (ours_out, theirs_out) = os.pipe(), os.pipe()
        request = json.dumps(dict(environ)).encode()
        socket.send_fds(self._asked, [request], [theirs_in, theirs_out])
        os.close(theirs_in)
        os.close(theirs_out)
        pid = int(self._asked.recv(LARGEST))
        return Child(pid, open(ours_in, "wb"), open(ours_out, "rb"))

    def wait(self, child: Child) -> int:
        """Returns the exit code of a child that ends, or has ended, as subprocess tells it."""
        assert self._asked is not None
        self._asked.send(json.dumps(child.pid).encode())
        child.stdin.close()
        child.stdout.close()
        return int(self._asked.recv(LARGEST))

    def kill(self, child: Child) -> None:
        """Ends a child that has not been waited for."""
        os.kill(child.pid, signal.SIGKILL)
        self.wait(child)


def _end(asked: socket.socket, process: subprocess.Popen[bytes]) -> None:
    asked.close()
    process.wait()


def _wait_for_requests(asked: socket.socket, serve: Callable[[], None]) -> None:
    while True:
        request, descriptors, _, _ = socket.recv_fds(asked, LARGEST, 2)
        if not request:
            return  # who asks is gone
        task = json.loads(request)
        if isinstance(task, int):
            _, status = os.waitpid(task, 0)
            asked.send(str(os.waitstatus_to_exitcode(status)).encode())
            continue
        pid = os.fork()
        if pid == 0:
            asked.close()
            for number, descriptor in enumerate(descriptors):
                os.dup2(descriptor, number)
                os.close(descriptor)
            os.environ.clear()
            os.environ.update(task)
            serve()
        for descriptor in descriptors:
            os.close(descriptor)
        asked.send(str(pid).encode())


def main() -> None:
    """Imports what most programs of tests would, and waits."""
    import gc

    import torch

    import mirror  # noqa: F401
    from tests.crew import serve

    torch.optim.SGD([torch.zeros(1)], lr=0.1)
    gc.freeze()  # so that nothing of it is copied, as a collection of garbage would
    _wait_for_requests(socket.socket(fileno=int(sys.argv[1])), serve)


if __name__ == "__main__":
    main()
