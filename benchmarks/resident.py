"""Processes that stay alive and work on command, so that contestants take turns in one run.

A process reads commands from its standard input and writes answers to its standard output, as a
line of JSON each. It needs only the standard library: a worker may run under another interpreter.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import Any


class Residents:
    """Processes that get every command at the same time; use it as a context manager.

    They start at once and load in parallel; the first ``ask`` waits for them.
    """

    def __init__(
        self, commands: Sequence[Sequence[str]], *, env: Mapping[str, str] | None = None
    ) -> None:
        self._stack = ExitStack()
        files = (tempfile.TemporaryFile("w+") for _ in commands)  # noqa: SIM115
        self._errors = [self._stack.enter_context(file) for file in files]
        self._processes = [
            subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, **(env or {})},
            )
            for command, errors in zip(commands, self._errors, strict=True)
        ]

    def ask(self, **command: object) -> list[Any]:
        """Returns the answers of all processes, in order.

        Raises:
            RuntimeError: one of them failed; with what it wrote to its standard error.
        """
        for process in self._processes:
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # it has ended; reading its answer raises the reason
                process.stdin.write(json.dumps(command) + "\n")
                process.stdin.flush()
        return [self._answer(i) for i in range(len(self._processes))]

    def _answer(self, i: int) -> Any:
        process, errors = self._processes[i], self._errors[i]
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            _end(process)
            errors.seek(0)
            message = f"{' '.join(process.args)} failed:\n{errors.read()[-4000:]}"
            self.close()  # the others may wait for it
            raise RuntimeError(message)
        return json.loads(line)

    def close(self) -> None:
        """Ends the processes; idempotent."""
        for process in self._processes:
            assert process.stdin is not None
            with suppress(BrokenPipeError):
                process.stdin.close()  # the end of its input ends it
        for process in self._processes:
            _end(process)
            assert process.stdout is not None
            process.stdout.close()
        self._stack.close()

    def __enter__(self) -> Residents:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _end(process: subprocess.Popen[str]) -> None:
    """Waits for a process that is about to end, with a timeout."""
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def serve(answer: Callable[[dict[str, Any]], object]) -> None:
    """In a process: answers commands until its input ends.

    What libraries print goes to the standard error, so that answers stay readable.
    """
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    for line in sys.stdin:
        answers.write(json.dumps(answer(json.loads(line))) + "\n")
        answers.flush()
