"""RemoteValue: the future result of a scheduled step."""

from __future__ import annotations

from typing import Any

from mirror.base.no_copy import NoCopy
from mirror.server.roles.closure_queue import Closure


class RemoteValue(NoCopy):
    """The result of a step that a coordinator has scheduled, once the step has ended.

    The result is stored in this process, so it outlives the worker.
    """

    _instead = "fetch it: coordinator.fetch(value)"

    def __init__(self, step: Closure) -> None:
        self._step = step

    def fetch(self) -> Any:
        """Waits for the step and returns its result.

        Raises:
            BaseException: the error of the step; ServerLostError if a server is lost;
                StrategyError if the step was not run, since another step raised.
        """
        self._step.ended.wait()
        if self._step.error is not None:
            raise self._step.error
        return self._step.value

    get = fetch

    def done(self) -> bool:
        """Returns whether the step has ended."""
        return self._step.ended.is_set()

    def __repr__(self) -> str:
        step = self._step
        state = "waits or runs" if not step.ended.is_set() else "has ended"
        if step.error is not None:
            state = f"has raised {type(step.error).__name__}"
        return f"RemoteValue(step {step.number}, which {state})"
