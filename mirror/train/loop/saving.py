"""SaveEvery: the hook that saves checkpoints while a training goes on."""

from __future__ import annotations

from mirror.train.loop.hook import Interval, Hook
from mirror.train.loop.state import TrainingState


class SaveEvery(Hook):
    """Saves every so many steps, or seconds; beside the training, which goes on.

    Args:
        steps: after steps that are multiples of it.
        seconds: of real time.

    Raises:
        ValueError: neither or both are given, or one is not above 0.
    """

    def __init__(self, steps: int | None = None, *, seconds: float | None = None) -> None:
        self._every = Interval("SaveEvery", steps, seconds)

    def begin(self, training: TrainingState) -> None:
        if training.manager is None:
            raise ValueError(
                "SaveEvery needs something to save with; pass Training(..., "
                "checkpoint=mirror.CheckpointManager(...))"
            )
        self._every.begin()

    def waits_for(self, step: int) -> bool:
        return self._every.counts_to(step)

    def after_step(self, training: TrainingState) -> None:
        if self._every.is_due(training.step):
            training.save()
