"""EveryNSteps: calls a function after every N steps of a strategy, between runs."""

from __future__ import annotations

from collections.abc import Callable

from mirror.execution.runner import Runner
from mirror.threads.user_frames import add_note


class EveryNSteps:
    """Calls ``act`` after every ``num_steps`` steps of a strategy, between runs.

    A step ends with an optimizer step outside ``run``, or with the ``run`` in which an optimizer
    stepped. See [Note: Ends of steps].

    Attributes:
        num_steps_done: the number of steps since this object was created.
    """

    def __init__(self, num_steps: int, runner: Runner, act: Callable[[], None]) -> None:
        self.num_steps_done = self._last = 0
        self._every, self._num_remaining = num_steps, num_steps
        self._runner, self._act = runner, act
        runner.replicas.timeline.at_step_ends.append(self._step_ends)

    def _step_ends(self) -> None:
        self.num_steps_done += 1
        self._num_remaining -= 1
        # In a merge, or in a parallel backward pass, the replicas are not done.
        is_due = self._num_remaining <= 0 and not self._runner.is_closed
        if is_due and self._runner.is_between_runs:
            before, self._last = self._last, self.num_steps_done
            self._num_remaining = self._every
            try:
                self._act()
            except Exception as error:
                then = f"after step {before}" if before else "never"
                add_note(error, f"found after step {self._last}; looked at before: {then}")
                raise
