"""The interface of hooks: what a hook sees of a training, its events, and when it is due.

TrainingState   the training as hooks see it: its step, its logged values, requests to it
Hook            the events that a hook may handle
Interval        every so many steps or seconds
"""

from __future__ import annotations

import numbers
import time

import torch
from torch import Tensor

from mirror.errors import StrategyError, short_repr
from mirror.server.roles.closure_queue import RemoteValue
from mirror.strategy.mirrored import MirroredStrategy
from mirror.strategy.parameter_server import ParameterServerStrategy
from mirror.train.checkpoint.manager import CheckpointManager
from mirror.train.loop.steps_in_flight import StepsInFlight
from mirror.values import PerReplica, is_int, is_real

Value = float | Tensor
AnyStrategy = MirroredStrategy | ParameterServerStrategy


def as_value(strategy: AnyStrategy, name: str, value: object) -> Value:
    """Returns a logged value as a number, or as a copied tensor of one element.

    Args:
        name: the name of the value, for errors.

    Raises:
        TypeError: it is neither.
    """
    if isinstance(value, PerReplica) and isinstance(strategy, MirroredStrategy):
        value = strategy.reduce("mean", value)
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        with torch.no_grad():
            return value.detach().clone()
    if isinstance(value, numbers.Real):
        return float(value)
    is_served = isinstance(strategy, ParameterServerStrategy)
    others = "RemoteValues of these" if is_served else "values per replica"
    raise TypeError(
        f"log() takes numbers, tensors of one element, and {others}; {name!r} is "
        f"{short_repr(value)}; log its mean, or its numbers under several names"
    )


class TrainingState:
    """The part of a training that hooks see: its progress, its logged values, and requests.

    Attributes:
        strategy: the strategy that trains.
        manager: saves and restores; ``None``: nothing is saved.
        step: the number of steps that have ended, including those before the checkpoint.
        first_step: the value of ``step`` when this process began.
        last_step: the number of the last step, if a hook has set it.
        reason: the reason to end; empty while the training continues.
        seconds_waiting: the time spent waiting for batches, since the beginning.
        reads_input: whether this process reads the batches, not the workers of servers.
        num_steps: the steps of all passes over the dataset, if known.
    """

    def __init__(self, strategy: AnyStrategy, manager: CheckpointManager | None) -> None:
        self.strategy, self.manager = strategy, manager
        self.step = self.first_step = 0
        self.last_step: int | None = None
        self.reason = ""
        self.seconds_waiting = 0.0
        self.reads_input = True
        self.num_steps: int | None = None
        self._values: dict[str, Value] = {}
        self._logged: dict[str, int] = {}
        self._is_to_save = False
        self._is_open = False
        self._flight: StepsInFlight | None = None

    def log(self, **values: object) -> None:
        """Records values of this step, for hooks to show or to write.

        Takes numbers, tensors of one element, and values per replica, which are averaged. The
        host does not wait for a GPU until a hook reads them. Under parameter servers it also
        takes RemoteValues, which hooks see when the step has ended.

        Raises:
            TypeError: a value has another type.
            StrategyError: the training has not begun, or is over.
        """
        self._check_open()
        flight = self._flight
        for name, value in values.items():
            if flight is not None and flight.now is not None:
                is_there = not isinstance(value, RemoteValue)
                flight.now.values[name] = self._as_value(name, value) if is_there else value
            else:
                self._record(name, value if flight is None else flight.fetch(value))

    def _as_value(self, name: str, value: object) -> Value:
        return as_value(self.strategy, name, value)

    def _record(self, name: str, value: object) -> None:
        self._values[name] = self._as_value(name, value)
        self._logged[name] = self.step

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all logged values, in the order of their first appearance."""
        return tuple(self._values)

    @property
    def logged_now(self) -> frozenset[str]:
        """The names of the values that the last ended step has logged."""
        return frozenset(n for n, step in self._logged.items() if step == self.step - 1)

    def value(self, name: str) -> float:
        """Returns the last logged value of a name, and waits for a GPU if necessary.

        Under parameter servers hooks see the value of the step that has ended.

        Raises:
            KeyError: there is none.
        """
        values = self._values_with(name)
        value = values[name]
        if not isinstance(value, float):
            values[name] = value = float(value)
        return value

    def peek(self, name: str) -> Value:
        """Returns the last logged value without waiting: a tensor may still be on a GPU.

        Raises:
            KeyError: there is none.
        """
        return self._values_with(name)[name]

    def _values_with(self, name: str) -> dict[str, Value]:
        """Returns the dict with the last logged value of a name."""
        flight = self._flight
        if flight is None or flight.now is None or name not in flight.now.values:
            return self._values
        values = flight.now.values
        values[name] = self._as_value(name, flight.fetch(values[name]))
        return values

    def stop(self, reason: str = "it was asked to") -> None:
        """Ends the training with this step, on all workers."""
        self.reason = self.reason or reason

    def save(self) -> None:
        """Requests a checkpoint at the end of this step, on all workers.

        Raises:
            StrategyError: the training has no manager.
        """
        if self.manager is None:
            raise StrategyError(
                "there is nothing to save with; pass Training(..., "
                "checkpoint=mirror.CheckpointManager(...))"
            )
        self._is_to_save = True

    def will_end_at(self, step: int) -> None:
        """Announces the last step, for progress bars; the earliest one counts."""
        self.last_step = step if self.last_step is None else min(step, self.last_step)

    def _check_open(self) -> None:
        if not self._is_open:
            raise StrategyError(
                "a Training is used inside its with statement: with Training(strategy, ...) as "
                "training: for batch in training.batches(dataset): ..."
            )


class Hook:
    """Base class of hooks; a subclass overrides the events that it needs.

    Attributes:
        chief_only: whether only the chief runs it, as hooks that write files or show progress.
            Such a hook must not call what all workers have to call.
    """

    chief_only = False

    def begin(self, training: TrainingState) -> None:
        """Called once, after the training was restored and before its first step."""

    def before_step(self, training: TrainingState) -> None:
        """Called when the batch of a step has arrived."""

    def waits_for(self, step: int) -> bool:
        """Returns whether ``after_step`` of this step must be called before the next step begins.

        Only parameter servers use it: with other strategies that is always so. There the loop may
        be some steps ahead of the workers, and acts on a hook's request when these have ended.
        """
        return False

    def after_step(self, training: TrainingState) -> None:
        """Called when a step has ended; ``training.step`` counts it."""

    def saved(self, training: TrainingState) -> None:
        """Called when a checkpoint of ``training.step`` was saved."""

    def end(self, training: TrainingState, error: BaseException | None) -> None:
        """Called once at the end, also after an error.

        Args:
            error: the exception that ends the training, if there is one.
        """


class Interval:
    """Decides when something is due again: every number of steps or seconds.

    Args:
        steps: due after steps that are multiples of this number.
        seconds: due after this much wall-clock time.

    Raises:
        ValueError: neither or both are given, or one is not above 0.
    """

    def __init__(self, owner: str, steps: int | None, seconds: float | None) -> None:
        if (steps is None) == (seconds is None):
            raise ValueError(
                f"{owner} takes a number of steps or of seconds; got "
                f"steps={steps!r} and seconds={seconds!r}; give one of them"
            )
        if steps is not None:
            check_count(owner, "steps", steps)
        else:
            check_seconds(owner, seconds)
        self._steps, self._seconds = steps, seconds
        self._last = time.monotonic()

    def begin(self) -> None:
        """Starts to count seconds."""
        self._last = time.monotonic()

    def counts_to(self, step: int) -> bool:
        """Returns whether it is due after this step, independent of the time."""
        return self._steps is not None and step % self._steps == 0

    def is_due(self, step: int) -> bool:
        """Returns whether it is due after this step."""
        if self._steps is not None:
            return step % self._steps == 0
        assert self._seconds is not None
        if time.monotonic() - self._last < self._seconds:
            return False
        self._last = time.monotonic()
        return True


def check_count(owner: str, name: str, count: object) -> None:
    """Raises ValueError unless a value is a whole number above 0."""
    if not is_int(count) or count < 1:
        raise ValueError(f"{owner}({name}=) is a whole number above 0; got {short_repr(count)}")


def check_seconds(owner: str, seconds: object) -> None:
    """Raises ValueError unless a value is a number above 0."""
    if not is_real(seconds) or not seconds > 0:
        raise ValueError(f"{owner}(seconds=) is a number above 0; got {short_repr(seconds)}")
