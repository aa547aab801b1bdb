"""SaveEvery: the hook that saves checkpoints while a training goes on.

Hooks that end a training: at a step, after a time, on a loss that is no number any more.
"""

from __future__ import annotations

import math
import time

from mirror.errors import NanLossError
from mirror.strategy.parameter_server import ParameterServerStrategy
from mirror.train.loop.hook import Hook, Interval, check_count, check_seconds
from mirror.train.loop.training_state import TrainingState


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


class StopAtStep(Hook):
    """Ends a training at a step.

    Args:
        last_step: the number of the last step, counted from the training's first beginning.
        num_steps: so many steps after this beginning, or going on; instead of ``last_step``.

    Raises:
        ValueError: neither or both are given, or one is no whole number above 0.
    """

    def __init__(self, last_step: int | None = None, *, num_steps: int | None = None) -> None:
        if (last_step is None) == (num_steps is None):
            raise ValueError(
                "StopAtStep takes last_step or num_steps; got "
                f"last_step={last_step!r} and num_steps={num_steps!r}; give one of them"
            )
        for name, count in (("last_step", last_step), ("num_steps", num_steps)):
            if count is not None:
                check_count("StopAtStep", name, count)
        self._last_step, self._num_steps = last_step, num_steps

    def begin(self, training: TrainingState) -> None:
        if self._num_steps is not None:
            self._last_step = training.step + self._num_steps
        assert self._last_step is not None
        training.will_end_at(self._last_step)

    def waits_for(self, step: int) -> bool:
        return self._last_step is not None and step >= self._last_step

    def after_step(self, training: TrainingState) -> None:
        if self._last_step is not None and training.step >= self._last_step:
            training.stop(f"step {training.step} was the last one")


class StopAfter(Hook):
    """Ends a training with the first step that ends after so many seconds.

    Raises:
        ValueError: they are not above 0.
    """

    def __init__(self, seconds: float) -> None:
        check_seconds("StopAfter", seconds)
        self._seconds, self._begun = seconds, time.monotonic()

    def begin(self, training: TrainingState) -> None:
        self._begun = time.monotonic()

    def after_step(self, training: TrainingState) -> None:
        if time.monotonic() - self._begun >= self._seconds:
            training.stop(f"{self._seconds:g} s are over")


class StopOnNan(Hook):
    """Ends a training when a value that was logged is NaN or infinite.

    Looks after every step, for which the host waits for a GPU.

    Args:
        name: which value; one that a step does not log is not looked at.
        raises: whether that is an error; else the training ends as if it were over, and saves.
    """

    def __init__(self, name: str = "loss", *, raises: bool = True) -> None:
        self._name, self._raises = name, raises

    def after_step(self, training: TrainingState) -> None:
        if self._name not in training.logged_now:
            return
        value = training.value(self._name)
        if math.isfinite(value):
            return
        told = f"{self._name!r} is {value} after step {training.step}"
        if self._raises:
            raise NanLossError(
                f"{told}; nothing was saved of it; lower the learning rate, clip gradients, or "
                f"find the cause with {_finder(training)}"
            )
        training.stop(told)


def _finder(training: TrainingState) -> str:
    if isinstance(training.strategy, ParameterServerStrategy):
        return "torch.autograd.detect_anomaly() in the step"
    return "Guards(finite_gradients=True)"
