"""StepEnds: detects the end of each training step and notifies listeners.

[Note: Ends of steps]
A step ends when an outermost run returns in which optimizers have stepped, or when an optimizer's
step returns outside any run (in the cross-replica context, or without a strategy). ``apply`` of a
Keras optimizer is a step, too. An optimizer step inside another optimizer's step belongs to the
outer one. A run without an optimizer step, such as an evaluation, ends no step.

The strategy's timeline is notified first, and through it ``EveryNSteps``; then the listeners,
which get the steps of all strategies, and those without a strategy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mirror.base.dynamo import disable_dynamo
from mirror.base.timeline import Timeline
from mirror.execution.replicas import current, enclosing_replica


class StepEnds:
    """Notifies listeners of the ends of steps. See [Note: Ends of steps].

    Attributes:
        listeners: called after each step of any strategy; they may raise, also SystemExit.
    """

    def __init__(self) -> None:
        self.listeners: list[Callable[[], None]] = []

    @disable_dynamo
    def optimizer_stepped(self, timeline: Timeline | None) -> None:
        """Records that an optimizer's step has returned in the calling thread.

        Args:
            timeline: the timeline of the step's strategy, if any.
        """
        replica = current.replica or enclosing_replica()
        if replica is None:
            self.notify(timeline)
            return
        run: Any = replica.run
        while run.outer is not None:
            run = run.outer
        run.has_stepped = True

    def notify(self, timeline: Timeline | None) -> None:
        """Notifies the timeline and the listeners of the end of a step."""
        if timeline is not None:
            timeline.end_step()
        for listener in tuple(self.listeners):
            listener()


step_ends = StepEnds()
