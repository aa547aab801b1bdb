"""A crew: processes that stand ready to be the workers of one test after another.

::

    def program(batches):               # at the top of a test file; runs on every worker
        strategy = mirror.MultiWorkerMirroredStrategy(["cpu"])
        ...
        return strategy.num_replicas_in_sync

    def test_it(crew):
        assert crew(2).run(program, batches=8) == [2, 2]

They are forks of one process that has torch (tests/nursery.py). One goes on to the next test,
unless one has failed: then all of them are made anew. They listen on loopback alone.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import pickle
import struct
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.nursery import Child, Nursery
from tests.ports import HeldPort

_LENGTH = struct.Struct("<Q")
_ROOT = Path(__file__).parent.parent
_NURSERY = Nursery()


class WorkersFailedError(Exception):
    """Some workers' programs have raised.

    Attributes:
        outcomes: per worker what its program has returned, the exception, or the exit code of a
            process that has ended.
    """

    def __init__(self, outcomes: list[Any], told: list[str]) -> None:
        super().__init__("\n".join(told))
        self.outcomes = outcomes


class Crew:
    """So many processes, with ranks, that run functions together."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._processes: list[Child] = []
        self._port: HeldPort | None = None

    def run(self, program: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Calls a function of a test file on every worker; returns what they return, by rank.

        Raises:
            WorkersFailedError: some have raised, or ended.
        """
        outcomes = self.outcomes(program, *args, **kwargs)
        told = [f"worker {w}: {text}" for w, (_, text) in enumerate(outcomes) if text]
        if told:
            raise WorkersFailedError([found for found, _ in outcomes], told)
        return [found for found, _ in outcomes]

    def outcomes(self, program: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """As ``run``; returns (result, None), (exception, its text) or (exit code, text)."""
        if not self._processes:
            self._start()
        file = sys.modules[program.__module__].__file__
        task = pickle.dumps((file, program.__qualname__, args, kwargs))
        for process in self._processes:
            process.stdin.write(_LENGTH.pack(len(task)) + task)
            process.stdin.flush()
        found = [_answer(process) for process in self._processes]
        if any(text for _, text in found):
            self.close()
        return found

    def pids(self) -> list[int]:
        """Returns the processes' ids."""
        if not self._processes:
            self._start()
        return [process.pid for process in self._processes]

    def close(self) -> None:
        """Ends the processes."""
        processes, self._processes = self._processes, []
        for process in processes:
            if not process.stdin.closed:  # else it has been waited for
                _NURSERY.kill(process)
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
            self._processes.append(_NURSERY.start(environ))


def _answer(process: Child) -> tuple[Any, str | None]:
    head = process.stdout.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        code = _NURSERY.wait(process)
        return code, f"the process has ended with {code}"
    answer: tuple[Any, str | None] = pickle.loads(process.stdout.read(_LENGTH.unpack(head)[0]))
    return answer


def serve() -> None:
    """Calls what is sent to its standard input, for good."""
    answers, sys.stdout = sys.stdout.buffer, sys.stderr
    while True:
        head = sys.stdin.buffer.read(_LENGTH.size)
        if len(head) < _LENGTH.size:
            os._exit(0)  # the test process is gone
        file, name, args, kwargs = pickle.loads(sys.stdin.buffer.read(_LENGTH.unpack(head)[0]))
        try:
            outcome = _called(file, name, args, kwargs), None
            answer = pickle.dumps(outcome)
        except BaseException as error:
            text = traceback.format_exc()
            try:
                answer = pickle.dumps((error, text))
                pickle.loads(answer)
            except Exception:  # it holds what cannot be sent
                answer = pickle.dumps((RuntimeError(str(error)), text))
        answers.write(_LENGTH.pack(len(answer)) + answer)
        answers.flush()


def _called(file: str, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    import torch

    torch.manual_seed(0)
    module = Path(file).relative_to(_ROOT).with_suffix("")
    found: Any = importlib.import_module(".".join(module.parts))
    for part in name.split("."):
        found = getattr(found, part)
    return found(*args, **kwargs)
