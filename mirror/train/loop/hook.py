"""Hook: what a training does besides its steps; and when, every so many steps or seconds."""

from __future__ import annotations

import time

from mirror.errors import short_repr
from mirror.train.loop.training_state import TrainingState


class Hook:
    """Base of what is called as a training goes on; a user's own overrides what it needs.

    Attributes:
        chief_only: whether only the first of several workers has it: what writes files, or shows
            something. Such a hook must do nothing that all workers have to do together.
    """

    chief_only = False

    def begin(self, training: TrainingState) -> None:
        """Called once, when the training has been restored and is about to begin."""

    def before_step(self, training: TrainingState) -> None:
        """Called when the batch of a step is there."""

    def waits_for(self, step: int) -> bool:
        """Whether ``after_step`` of this step has to be called before another step begins.

        Only parameter servers ask: elsewhere it always is. There the loop is otherwise some steps
        ahead of the workers, and what a hook asks for is done when these steps have ended.
        """
        return False

    def after_step(self, training: TrainingState) -> None:
        """Called when a step has ended; ``training.step`` counts it."""

    def saved(self, training: TrainingState) -> None:
        """Called when a checkpoint of ``training.step`` was saved."""

    def end(self, training: TrainingState, error: BaseException | None) -> None:
        """Called once at the end, whatever ends it.

        Args:
            error: what the program has raised, if it has.
        """


class Interval:
    """Tells when something is due again: so many steps, or seconds, after it was last.

    Args:
        steps: the multiples of this number.
        seconds: of real time.

    Raises:
        ValueError: neither or both are given, or one is not above 0.
    """

    def __init__(self, whose: str, steps: int | None, seconds: float | None) -> None:
        if (steps is None) == (seconds is None):
            raise ValueError(
                f"{whose} is due every so many steps or every so many seconds; got "
                f"steps={steps!r} and seconds={seconds!r}; give one of them"
            )
        if steps is not None:
            check_count(whose, "steps", steps)
        else:
            check_seconds(whose, seconds)
        self._steps, self._seconds = steps, seconds
        self._last = time.monotonic()

    def begin(self) -> None:
        """Counts seconds from now on."""
        self._last = time.monotonic()

    def counts_to(self, step: int) -> bool:
        """Whether it is due after this step whenever that ends."""
        return self._steps is not None and step % self._steps == 0

    def is_due(self, step: int) -> bool:
        """Whether it is due after this step."""
        if self._steps is not None:
            return step % self._steps == 0
        assert self._seconds is not None
        if time.monotonic() - self._last < self._seconds:
            return False
        self._last = time.monotonic()
        return True


def check_count(whose: str, name: str, count: object) -> None:
    """Raises ValueError for what is no whole number above 0."""
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"{whose}({name}=) is a whole number above 0; got {short_repr(count)}")


def check_seconds(whose: str, seconds: object) -> None:
    """Raises ValueError for what is no number above 0."""
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds > 0:
        raise ValueError(f"{whose}(seconds=) is a number above 0; got {short_repr(seconds)}")
