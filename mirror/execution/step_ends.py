"""Where steps of training end: between two of them nothing is half done.

[Note: Ends of steps]
A step ends where an outermost run returns in which an optimizer has made a step, or several; or
where an optimizer's step returns outside any run, in the cross-replica context or without any
strategy. ``apply`` of a Keras optimizer is a step as well. An optimizer that steps within another
one's step is a part of that. A run without a step, of a forward pass or an evaluation, ends
nothing.

It is told to the timeline of the strategy, and through that to what the strategy does every so
many steps; then to the listeners, who want to know of all strategies, and of none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mirror.base.timeline import Timeline
from mirror.execution.current_replica import current, enclosing_replica
from mirror.execution.run_state import Run


class StepEnds:
    """Tells where steps end. See [Note: Ends of steps].

    Attributes:
        listeners: what is called there, of whatever strategy; it may raise, SystemExit too.
    """

    def __init__(self) -> None:
        self.listeners: list[Callable[[], None]] = []

    def optimizer_stepped(self, timeline: Timeline | None) -> None:
        """Notes that an optimizer's step has returned in the calling thread.

        Args:
            timeline: of the strategy that the step belongs to, if to any.
        """
        replica = current.replica or enclosing_replica()
        if replica is None:
            self.notify(timeline)
            return
        run: Any = replica.run
        while run.outer is not None:
            run = run.outer
        run.has_stepped = True

    def run_ended(self, run: Run) -> None:
        """Notes that an outermost run has returned in which an optimizer has stepped."""
        self.notify(run.replicas.timeline)

    def notify(self, timeline: Timeline | None) -> None:
        """Tells that a step has ended."""
        if timeline is not None:
            timeline.end_step()
        for listener in tuple(self.listeners):
            listener()


step_ends = StepEnds()
