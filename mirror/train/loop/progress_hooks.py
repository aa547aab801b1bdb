"""Hooks that show how a training goes: lines, and a progress bar."""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from mirror.strategy.mirrored import MirroredStrategy
from mirror.strategy.parameter_server import ParameterServerStrategy
from mirror.tools.demo import ProgressLine
from mirror.train.loop.hook import Hook, Interval
from mirror.train.loop.training_state import TrainingState


class LogEvery(Hook):
    """Tells a line every so many steps, or seconds: values, steps a second, the wait for input.

    ::

        step 200: loss 0.3127, 812 steps/s, 3 % waiting for input

    Args:
        steps: after steps that are multiples of it.
        seconds: of real time.
        to: is called with the line; a logger's ``info``, for instance.

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
        self._pace = StepRate()

    def begin(self, training: TrainingState) -> None:
        self._every.begin()
        self._pace = StepRate()
        self._pace.since(training)

    def after_step(self, training: TrainingState) -> None:
        if self._every.is_due(training.step):
            values = [f"{name} {training.value(name):.4g}" for name in training.names]
            rate, waiting = self._pace.since(training)
            told = [*values, f"{rate:.3g} steps/s"]
            if training.reads_input:
                told.append(f"{waiting:.0%} waiting for input")
            self._to(f"step {training.step}: {', '.join(told)}".replace("%", " %"))


class StepRate:
    """How fast a training goes, from one look to the next."""

    def __init__(self) -> None:
        self._at, self._step, self._waiting = time.perf_counter(), 0, 0.0

    def since(self, training: TrainingState) -> tuple[float, float]:
        """Returns steps per second, and which part of the time was spent waiting for input."""
        now = time.perf_counter()
        seconds = max(now - self._at, 1e-9)
        rate = (training.step - self._step) / seconds
        waiting = min((training.seconds_waiting - self._waiting) / seconds, 1.0)
        self._at, self._step, self._waiting = now, training.step, training.seconds_waiting
        return rate, waiting


class ProgressBar(Hook):
    """Shows a bar with the rate, the time that is left, the wait for input and the replicas.

    By tqdm where it is installed, in notebooks too, or by rich; else on a terminal, and nowhere
    else. Values are shown as they are logged, twice a second: then the host waits for a GPU.
    """

    chief_only = True

    def __init__(self) -> None:
        self._every = Interval("ProgressBar", None, 0.5)
        self._pace = StepRate()
        self._bar: _Tqdm | _Rich | _Plain | None = None

    def begin(self, training: TrainingState) -> None:
        self._pace = StepRate()
        self._pace.since(training)

    def after_step(self, training: TrainingState) -> None:
        if self._bar is None:
            self._bar = _bar(_total(training), training.step - 1)
            self._every.begin()
        elif not self._every.is_due(training.step):
            return
        rate, waiting = self._pace.since(training)
        told = [f"{name} {training.value(name):.4g}" for name in training.names]
        if training.reads_input:
            told.append(f"input {waiting:.0%}")
        told.append(_who_trains(training.strategy))
        self._bar.show(training.step, rate, ", ".join(told))

    def end(self, training: TrainingState, error: BaseException | None) -> None:
        if self._bar is not None:
            self._bar.close(training.step)
            self._bar = None


def _who_trains(strategy: MirroredStrategy | ParameterServerStrategy) -> str:
    if isinstance(strategy, ParameterServerStrategy):
        return f"{strategy.num_workers} workers"
    return f"{strategy.num_replicas_in_sync} replicas"


class _Tqdm:
    def __init__(self, kind: Any, total: int | None, step: int) -> None:
        self._bar = kind(total=total, initial=step, unit="step", dynamic_ncols=True)

    def show(self, step: int, rate: float, told: str) -> None:
        self._bar.set_postfix_str(told, refresh=False)
        self._bar.update(step - self._bar.n)

    def close(self, step: int) -> None:
        self._bar.update(step - self._bar.n)
        self._bar.close()


class _Rich:
    def __init__(self, kinds: Any, total: int | None, step: int) -> None:
        words = kinds.TextColumn("{task.description}", markup=False)
        columns = kinds.BarColumn(), kinds.MofNCompleteColumn(), words
        self._total = total
        self._bar = kinds.Progress(*columns, auto_refresh=False)  # which is a thread
        self._bar.start()
        self._task = self._bar.add_task("", total=total, completed=step)

    def show(self, step: int, rate: float, told: str) -> None:
        words = f"{rate:.3g} steps/s,{_format_remaining(self._total, step, rate)} {told}"
        self._bar.update(self._task, completed=step, description=words, refresh=True)

    def close(self, step: int) -> None:
        self._bar.update(self._task, completed=step, refresh=True)
        self._bar.stop()


class _Plain:
    def __init__(self, total: int | None, step: int) -> None:
        self._total = total
        self._bar = ProgressLine("training", max(total or 1, 1))

    def show(self, step: int, rate: float, told: str) -> None:
        left = _format_remaining(self._total, step, rate)
        of = "" if self._total is None else f"/{self._total}"
        done = 0 if self._total is None else min(step, self._total)
        self._bar.show(done, f"{step}{of}, {rate:.3g} steps/s,{left} {told}")

    def close(self, step: int) -> None:
        self._bar.__exit__(None, None, None)


def _format_remaining(total: int | None, step: int, rate: float) -> str:
    """Returns when the last step will have ended, as far as that is known."""
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
    """Returns the number of the last step, as far as that is known."""
    if training.last_step is not None:
        return training.last_step
    return training.num_steps
