"""RemoteValue: what a scheduled step will have returned."""

from __future__ import annotations

from typing import Any

from mirror.base.no_copy import NoCopy
from mirror.server.roles.closure_queue import Closure


class RemoteValue(NoCopy):
    """Stands for the result of a step that a coordinator has scheduled.

    It is kept here once the step has ended, whatever becomes of the worker.
    """

    _instead = "fetch it: coordinator.fetch(value)"

    def __init__(self, step: Closure) -> None:
        self._step = step

    def fetch(self) -> Any:
        """Waits for the step and returns what it has returned.

        Raises:
            BaseException: what the step has raised; ServerLostError if a server is gone;
                StrategyError if the step was not run, since another one has raised.
        """
        self._step.ended.wait()
        if self._step.error is not None:
            raise self._step.error
        return self._step.value

    get = fetch

    def done(self) -> bool:
        """Whether the step has ended."""
        return self._step.ended.is_set()

    def __repr__(self) -> str:
        step = self._step
        state = "waits or runs" if not step.ended.is_set() else "has ended"
        if step.error is not None:
            state = f"has raised {type(step.error).__name__}"
        return f"RemoteValue(step {step.number}, which {state})"
