"""Processes that run functions of test files as the workers of one cluster, test after test.

::

    def program(batches):               # at the top of a test file; runs on every worker
        strategy = mirror.MultiWorkerMirroredStrategy(["cpu"])
        ...
        return strategy.num_replicas_in_sync

    def test_it(worker_pool):
        assert worker_pool(2).run(program, batches=8) == [2, 2]

The workers of a pool run one test after another; if one fails, all of them are replaced. They
listen on loopback only. A fork server starts them: a process that has imported torch, since
starting Python and importing torch takes seconds of processor time, a fork a hundredth.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from tests.ports import HeldPort

MAX_REQUEST_BYTES = 1 << 20  # a request is an environment
_LENGTH = struct.Struct("<Q")
_ROOT = Path(__file__).parent.parent


class WorkersFailedError(Exception):
    """The programs of some workers have raised.

    Attributes:
        outcomes: per worker the result of its program, its exception, or the exit code of its
            process.
    """

    def __init__(self, outcomes: list[Any], texts: list[str]) -> None:
        super().__init__("\n".join(texts))
        self.outcomes = outcomes


class WorkerPool:
    """The processes of a cluster of ``size`` workers, which run functions together."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._processes: list[ForkedProcess] = []
        self._port: HeldPort | None = None

    def run(self, program: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Calls a function of a test file on every worker; returns the results by rank.

        Raises:
            WorkersFailedError: some have raised, or exited.
        """
        outcomes = self.outcomes(program, *args, **kwargs)
        texts = [f"worker {w}: {text}" for w, (_, text) in enumerate(outcomes) if text]
        if texts:
            raise WorkersFailedError([result for result, _ in outcomes], texts)
        return [result for result, _ in outcomes]

    def outcomes(self, program: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """As ``run``; returns (result, None), (exception, its text) or (exit code, text)."""
        if not self._processes:
            self._start()
        file = sys.modules[program.__module__].__file__
        task = pickle.dumps((file, program.__qualname__, args, kwargs))
        for process in self._processes:
            process.stdin.write(_LENGTH.pack(len(task)) + task)
            process.stdin.flush()
        outcomes = [_receive(process) for process in self._processes]
        if any(text for _, text in outcomes):
            self.close()
        return outcomes

    def pids(self) -> list[int]:
        """Returns the processes' ids."""
        if not self._processes:
            self._start()
        return [process.pid for process in self._processes]

    def close(self) -> None:
        """Kills the processes."""
        processes, self._processes = self._processes, []
        for process in processes:
            if not process.stdin.closed:  # else it has exited
                _FORK_SERVER.kill(process)
        if self._port is not None:
            self._port.close()

    def _start(self) -> None:
        port = self._port = HeldPort()
        for rank in range(self.size):
            environ = {
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(self.size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port.number),
                "GLOO_SOCKET_IFNAME": "lo",
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")]),
            }
            self._processes.append(_FORK_SERVER.start(environ))


@dataclass(frozen=True)
class ForkedProcess:
    """A worker process, with pipes to its standard input and from its standard output."""

    pid: int
    stdin: BinaryIO
    stdout: BinaryIO


class ForkServer:
    """The process that forks workers; it starts with the first one, and ends with this process."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None

    def start(self, environ: Mapping[str, str]) -> ForkedProcess:
        """Returns a new fork with that environment, which runs ``serve_tasks``."""
        if self._socket is None:
            self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                process = subprocess.Popen(
                    [sys.executable, "-m", "tests.worker_pool", str(theirs.fileno())],
                    env={**os.environ, **environ},
                    stdin=subprocess.DEVNULL,
                    cwd=_ROOT,
                    pass_fds=[theirs.fileno()],
                )
            atexit.register(_end, self._socket, process)
        (theirs_in, ours_in), (ours_out, theirs_out) = os.pipe(), os.pipe()
        request = json.dumps(dict(environ)).encode()
        socket.send_fds(self._socket, [request], [theirs_in, theirs_out])
        os.close(theirs_in)
        os.close(theirs_out)
        pid = int(self._socket.recv(MAX_REQUEST_BYTES))
        return ForkedProcess(pid, open(ours_in, "wb"), open(ours_out, "rb"))

    def wait(self, process: ForkedProcess) -> int:
        """Waits until a fork exits; returns its exit code, as subprocess does."""
        assert self._socket is not None
        self._socket.send(json.dumps(process.pid).encode())
        process.stdin.close()
        process.stdout.close()
        return int(self._socket.recv(MAX_REQUEST_BYTES))

    def kill(self, process: ForkedProcess) -> None:
        """Kills a fork for which ``wait`` has not been called."""
        os.kill(process.pid, signal.SIGKILL)
        self.wait(process)


_FORK_SERVER = ForkServer()


def _end(connection: socket.socket, process: subprocess.Popen[bytes]) -> None:
    connection.close()
    process.wait()


def _receive(process: ForkedProcess) -> tuple[Any, str | None]:
    head = process.stdout.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        code = _FORK_SERVER.wait(process)
        return code, f"the process has ended with {code}"
    answer: tuple[Any, str | None] = pickle.loads(process.stdout.read(_LENGTH.unpack(head)[0]))
    return answer


def serve_forks(connection: socket.socket) -> None:
    """The loop of the fork server: a request is an environment, or a fork's id to wait for."""
    while True:
        request, descriptors, _, _ = socket.recv_fds(connection, MAX_REQUEST_BYTES, 2)
        if not request:
            return  # the test process has exited
        task = json.loads(request)
        if isinstance(task, int):
            _, status = os.waitpid(task, 0)
            connection.send(str(os.waitstatus_to_exitcode(status)).encode())
            continue
        pid = os.fork()
        if pid == 0:
            connection.close()
            for number, descriptor in enumerate(descriptors):
                os.dup2(descriptor, number)
                os.close(descriptor)
            os.environ.clear()
            os.environ.update(task)
            serve_tasks()
        for descriptor in descriptors:
            os.close(descriptor)
        connection.send(str(pid).encode())


def serve_tasks() -> None:
    """The loop of a worker: reads calls from its standard input, and writes their outcomes."""
    answers, sys.stdout = sys.stdout.buffer, sys.stderr
    while True:
        head = sys.stdin.buffer.read(_LENGTH.size)
        if len(head) < _LENGTH.size:
            os._exit(0)  # the test process has exited
        file, name, args, kwargs = pickle.loads(sys.stdin.buffer.read(_LENGTH.unpack(head)[0]))
        try:
            answer = pickle.dumps((_call(file, name, args, kwargs), None))
        except BaseException as error:
            text = traceback.format_exc()
            try:
                answer = pickle.dumps((error, text))
                pickle.loads(answer)
            except Exception:  # it cannot be pickled
                answer = pickle.dumps((RuntimeError(str(error)), text))
        answers.write(_LENGTH.pack(len(answer)) + answer)
        answers.flush()


def _call(file: str, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    import torch

    torch.manual_seed(0)
    path = Path(file).relative_to(_ROOT).with_suffix("")
    found: Any = importlib.import_module(".".join(path.parts))
    for attribute in name.split("."):
        found = getattr(found, attribute)
    return found(*args, **kwargs)


def main() -> None:
    """Imports what most programs of tests would import, and serves."""
    import torch

    import mirror  # noqa: F401

    torch.optim.SGD([torch.zeros(1)], lr=0.1)
    importlib.import_module("torch._functorch.aot_autograd")  # what a compiled step needs
    gc.freeze()  # so that a collection does not write to, and copy, shared pages
    serve_forks(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    main()
