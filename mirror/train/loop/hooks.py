"""Hooks that save, stop, log lines and show a progress bar."""

from __future__ import annotations

import importlib
import math
import os
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, TextIO

from mirror.errors import NanLossError
from mirror.strategy.mirrored import MirroredStrategy
from mirror.strategy.parameter_server import ParameterServerStrategy
from mirror.train.loop.hook import Hook, Interval, TrainingState, check_count, check_seconds


class SaveEvery(Hook):
    """Saves every number of steps or seconds, while the training continues.

    Args:
        steps: saves after steps that are multiples of it.
        seconds: saves after this much wall-clock time.

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
        last_step: the number of the last step, counted over all restarts.
        num_steps: the number of steps from this start or restart; instead of ``last_step``.

    Raises:
        ValueError: neither or both are given, or one is not a whole number above 0.
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
    """Ends a training with the first step that ends after a number of seconds.

    Raises:
        ValueError: ``seconds`` is not above 0.
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
    """Ends a training when a logged value is NaN or infinite.

    It checks after every step, so the host waits for the GPU there.

    Args:
        name: the name of the value; steps that do not log it are not checked.
        raises: whether to raise an error; otherwise the training ends normally, and saves.
    """

    def __init__(self, name: str = "loss", *, raises: bool = True) -> None:
        self._name, self._raises = name, raises

    def after_step(self, training: TrainingState) -> None:
        if self._name not in training.logged_now:
            return
        value = training.value(self._name)
        if math.isfinite(value):
            return
        problem = f"{self._name!r} is {value} after step {training.step}"
        if self._raises:
            is_served = isinstance(training.strategy, ParameterServerStrategy)
            finder = "Guards(finite_gradients=True)"
            if is_served:
                finder = "torch.autograd.detect_anomaly() in the step"
            raise NanLossError(
                f"{problem}; nothing was saved of it; lower the learning rate, clip gradients, or "
                f"find the cause with {finder}"
            )
        training.stop(problem)


class LogEvery(Hook):
    """Logs a line every number of steps or seconds: values, steps per second, waiting for input.

    ::

        step 200: loss 0.3127, 812 steps/s, 3 % waiting for input

    Args:
        steps: logs after steps that are multiples of it.
        seconds: logs after this much wall-clock time.
        to: called with the line; for example the ``info`` of a logger.

    Raises:
        ValueError: neither or both are given, or one is not above 0.
    """

    chief_only = True

    def __init__(
        self,
        steps: int | None = None,
        *,
        seconds: float | None = None,
        to: Callable[[str], object] = print,
    ) -> None:
        self._every = Interval("LogEvery", steps, seconds)
        self._to = to
        self._rate = StepRate()

    def begin(self, training: TrainingState) -> None:
        self._every.begin()
        self._rate = StepRate()
        self._rate.measure(training)

    def after_step(self, training: TrainingState) -> None:
        if self._every.is_due(training.step):
            values = [f"{name} {training.value(name):.4g}" for name in training.names]
            rate, waiting = self._rate.measure(training)
            parts = [*values, f"{rate:.3g} steps/s"]
            if training.reads_input:
                parts.append(f"{waiting:.0%} waiting for input")
            self._to(f"step {training.step}: {', '.join(parts)}".replace("%", " %"))


class StepRate:
    """Steps per second between two readings."""

    def __init__(self) -> None:
        self._at, self._step, self._waiting = time.perf_counter(), 0, 0.0

    def measure(self, training: TrainingState) -> tuple[float, float]:
        """Returns steps per second, and the share of the time spent waiting for input."""
        now = time.perf_counter()
        seconds = max(now - self._at, 1e-9)
        rate = (training.step - self._step) / seconds
        waiting = min((training.seconds_waiting - self._waiting) / seconds, 1.0)
        self._at, self._step, self._waiting = now, training.step, training.seconds_waiting
        return rate, waiting


class ProgressBar(Hook):
    """Shows a bar with the rate, the remaining time, the wait for input and the replicas.

    It uses tqdm if that is installed, also in notebooks, or rich; otherwise it draws on a terminal
    only. It updates twice a second, and the host waits for a GPU then.
    """

    chief_only = True

    def __init__(self) -> None:
        self._every = Interval("ProgressBar", None, 0.5)
        self._rate = StepRate()
        self._bar: _Tqdm | _Rich | _Plain | None = None

    def begin(self, training: TrainingState) -> None:
        self._rate = StepRate()
        self._rate.measure(training)

    def after_step(self, training: TrainingState) -> None:
        if self._bar is None:
            self._bar = _bar(_total(training), training.step - 1)
            self._every.begin()
        elif not self._every.is_due(training.step):
            return
        rate, waiting = self._rate.measure(training)
        parts = [f"{name} {training.value(name):.4g}" for name in training.names]
        if training.reads_input:
            parts.append(f"input {waiting:.0%}")
        parts.append(_describe_workers(training.strategy))
        self._bar.show(training.step, rate, ", ".join(parts))

    def end(self, training: TrainingState, error: BaseException | None) -> None:
        if self._bar is not None:
            self._bar.close(training.step)
            self._bar = None


def _describe_workers(strategy: MirroredStrategy | ParameterServerStrategy) -> str:
    if isinstance(strategy, ParameterServerStrategy):
        return f"{strategy.num_workers} workers"
    return f"{strategy.num_replicas_in_sync} replicas"


class _Tqdm:
    def __init__(self, kind: Any, total: int | None, step: int) -> None:
        self._bar = kind(total=total, initial=step, unit="step", dynamic_ncols=True)

    def show(self, step: int, rate: float, text: str) -> None:
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.update(step - self._bar.n)

    def close(self, step: int) -> None:
        self._bar.update(step - self._bar.n)
        self._bar.close()


class _Rich:
    def __init__(self, kinds: Any, total: int | None, step: int) -> None:
        words = kinds.TextColumn("{task.description}", markup=False)
        columns = kinds.BarColumn(), kinds.MofNCompleteColumn(), words
        self._total = total
        self._bar = kinds.Progress(*columns, auto_refresh=False)  # a thread would refresh
        self._bar.start()
        self._task = self._bar.add_task("", total=total, completed=step)

    def show(self, step: int, rate: float, text: str) -> None:
        words = f"{rate:.3g} steps/s,{_format_remaining(self._total, step, rate)} {text}"
        self._bar.update(self._task, completed=step, description=words, refresh=True)

    def close(self, step: int) -> None:
        self._bar.update(self._task, completed=step, refresh=True)
        self._bar.stop()


class _Plain:
    def __init__(self, total: int | None, step: int) -> None:
        self._total = total
        self._bar = ProgressLine("training", max(total or 1, 1))

    def show(self, step: int, rate: float, text: str) -> None:
        left = _format_remaining(self._total, step, rate)
        of = "" if self._total is None else f"/{self._total}"
        done = 0 if self._total is None else min(step, self._total)
        self._bar.show(done, f"{step}{of}, {rate:.3g} steps/s,{left} {text}")

    def close(self, step: int) -> None:
        self._bar.__exit__(None, None, None)


def _format_remaining(total: int | None, step: int, rate: float) -> str:
    """Returns the remaining time as text; empty if it is unknown."""
    if total is None or rate <= 0:
        return ""
    seconds = math.ceil((total - step) / rate)
    return f" {seconds // 60}:{seconds % 60:02d} left,"


def _bar(total: int | None, step: int) -> _Tqdm | _Rich | _Plain:
    with suppress(ModuleNotFoundError):
        return _Tqdm(importlib.import_module("tqdm.auto").tqdm, total, step)
    with suppress(ModuleNotFoundError):
        return _Rich(importlib.import_module("rich.progress"), total, step)
    return _Plain(total, step)


def _total(training: TrainingState) -> int | None:
    """Returns the number of the last step, if it is known."""
    if training.last_step is not None:
        return training.last_step
    return training.num_steps


_CLEAR_LINE = "\r\x1b[K"
_REDRAW_SECONDS = 0.1
_BAR_WIDTH = 24


class ProgressLine:
    """A progress bar in one line of a terminal; elsewhere it shows nothing.

    As a context manager it leaves the cursor at the start of an empty line, also after an error.

    Attributes:
        live: whether there is a terminal that shows a bar.
    """

    def __init__(self, label: str, total: int, stream: TextIO | None = None) -> None:
        self.stream = sys.stdout if stream is None else stream
        self.live = (
            self.stream.isatty()
            and not os.environ.get("CI")
            and os.environ.get("TERM", "dumb") != "dumb"
        )
        self._label = label
        self._total = total
        self._drawn = 0.0

    def is_due(self) -> bool:
        """Returns whether enough time has passed to draw again."""
        return self.live and time.perf_counter() - self._drawn >= _REDRAW_SECONDS

    def show(self, done: int, text: str) -> None:
        """Draws the bar with ``done`` of the total, followed by ``text``, cut to one line."""
        if not self.live:
            return
        filled = _BAR_WIDTH * done // self._total
        bar = "#" * filled + "-" * (_BAR_WIDTH - filled)
        # Some terminals wrap a line of the full width, and a wrapped line cannot be cleared.
        width = shutil.get_terminal_size().columns - 1
        # Recorded first: Ctrl-C may interrupt the write.
        self._drawn = time.perf_counter()
        self._write(_CLEAR_LINE + f"{self._label} [{bar}] {text}"[:width])

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.live and self._drawn:
            self._write(_CLEAR_LINE)

    def _write(self, text: str) -> None:
        self.stream.write(text)
        self.stream.flush()
