"""Where steps of training end: between two of them nothing is half done.

[Note: Ends of steps]
A step ends where an outermost run returns in which an optimizer has made a step, or several; or
where an optimizer's step returns outside any run, in the cross-replica context or without any
strategy. An optimizer that steps within another one's step is a part of that. A run without a
step, of a forward pass or an evaluation, ends nothing.

While nobody listens, runs and steps look whether somebody does, and call nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from mirror.execution.current import replica_around
from mirror.execution.run import Run


class StepEnds:
    """Tells where steps end. See [Note: Ends of steps].

    Attributes:
        listeners: what is called there; it may raise, SystemExit too.
    """

    def __init__(self) -> None:
        self.listeners: list[Callable[[], None]] = []
        self._stepped: weakref.WeakSet[Run] = weakref.WeakSet()  # outermost ones, still going on

    def optimizer_stepped(self) -> None:
        """Notes that an optimizer's step has returned in the calling thread."""
        replica = replica_around()
        run: Any = None if replica is None else replica.run
        if run is None:
            self._tell()
            return
        while run.outer is not None:
            run = run.outer
        self._stepped.add(run)

    def run_ended(self, run: Run) -> None:
        """Notes that an outermost run has returned."""
        if run in self._stepped:
            self._stepped.discard(run)
            self._tell()

    def _tell(self) -> None:
        for listener in tuple(self.listeners):
            listener()


step_ends = StepEnds()
