"""Every: something done after every so many steps, when nothing is going on."""

from __future__ import annotations

from collections.abc import Callable

from mirror.execution.runner import Runner
from mirror.threads.user_frames import add_note


class EveryNSteps:
    """Calls ``act`` after every ``num_steps`` steps of a strategy, between runs.

    A step ends as a report's does: with an optimizer step outside ``run``, or with the ``run`` in
    which an optimizer stepped.

    Attributes:
        num_steps_done: since the strategy was made.
    """

    def __init__(self, num_steps: int, runner: Runner, act: Callable[[], None]) -> None:
        self.num_steps_done = self._last = 0
        self._every, self._left = num_steps, num_steps
        self._runner, self._act = runner, act
        runner.replicas.timeline.at_step_ends.append(self._step_ends)

    def _step_ends(self) -> None:
        self.num_steps_done += 1
        self._left -= 1
        # In a merge, or a backward pass of others' threads, the replicas are not done.
        if self._left <= 0 and self._runner.is_between_runs:
            self._left, before, self._last = self._every, self._last, self.num_steps_done
            try:
                self._act()
            except Exception as error:
                then = f"after step {before}" if before else "never"
                add_note(error, f"found after step {self._last}; looked at before: {then}")
                raise
