"""What a training logs: numbers, which may be on a GPU still.

TrainingState: how far a training is, what it has logged, and what is asked of it.
"""

from __future__ import annotations

import numbers

import torch
from torch import Tensor

from mirror.errors import StrategyError, short_repr
from mirror.server.roles.remote_value import RemoteValue
from mirror.strategy.mirrored import MirroredStrategy
from mirror.strategy.parameter_server import ParameterServerStrategy
from mirror.train.checkpoint.manager import CheckpointManager
from mirror.train.loop.steps_in_flight import StepsInFlight
from mirror.values import PerReplica

Value = float | Tensor
AnyStrategy = MirroredStrategy | ParameterServerStrategy


def as_value(strategy: AnyStrategy, name: str, value: object) -> Value:
    """Returns a number, or a tensor of one element that nobody changes any more.

    Args:
        name: for messages.

    Raises:
        TypeError: it is none.
    """
    if isinstance(value, PerReplica) and isinstance(strategy, MirroredStrategy):
        value = strategy.reduce("mean", value)
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        with torch.no_grad():
            return value.detach().clone()
    if isinstance(value, numbers.Real):
        return float(value)
    raise TypeError(
        f"log() takes numbers, tensors of one element, {_kinds(strategy)}; {name!r} is "
        f"{short_repr(value)}; log its mean, or several of its numbers under names of their own"
    )


def _kinds(strategy: AnyStrategy) -> str:
    if isinstance(strategy, ParameterServerStrategy):
        return "and RemoteValues of these"
    return "and values per replica"


class TrainingState:
    """What hooks see of a training, and may ask of it.

    Attributes:
        strategy: the one that trains.
        manager: saves and restores, if something does.
        step: how many steps have ended, those before the checkpoint included.
        first_step: what it was when this process began.
        last_step: where it will end, if a hook knows.
        reason: why it is to end; empty while it goes on.
        seconds_waiting: for batches, since the beginning.
        reads_input: whether this process reads the batches; otherwise workers of servers do.
        num_steps: of all passes of the dataset, if that is known.
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
        """Notes values of this step, for hooks to show or to write.

        Numbers, tensors of one element, and values per replica, whose mean counts. Nobody waits
        for a GPU before a hook wants to know them. Under parameter servers also RemoteValues,
        which hooks see when the step has ended.

        Raises:
            TypeError: a value is none of these.
            StrategyError: the training has not begun, or is over.
        """
        self._check_open()
        flight = self._flight
        for name, value in values.items():
            if flight is not None and flight.now is not None:
                is_there = not isinstance(value, RemoteValue)
                flight.now.values[name] = self._as_value(name, value) if is_there else value
            else:
                self._note(name, value if flight is None else flight.fetch(value))

    def _as_value(self, name: str, value: object) -> Value:
        return as_value(self.strategy, name, value)

    def _note(self, name: str, value: object) -> None:
        self._values[name] = self._as_value(name, value)
        self._logged[name] = self.step

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all values that were logged so far, in the order in which they came."""
        return tuple(self._values)

    @property
    def logged_now(self) -> frozenset[str]:
        """The names of the values that the step that has just ended has logged."""
        return frozenset(n for n, step in self._logged.items() if step == self.step - 1)

    def value(self, name: str) -> float:
        """Returns the value that was logged last under a name.

        Under parameter servers hooks see that of the step that has ended.

        Raises:
            KeyError: there is none.
        """
        values = self._values_with(name)
        value = values[name]
        if not isinstance(value, float):
            values[name] = value = float(value)
        return value

    def value_there(self, name: str) -> Value:
        """Returns the value that was logged last as it is: a tensor may be on a GPU still.

        Raises:
            KeyError: there is none.
        """
        return self._values_with(name)[name]

    def _values_with(self, name: str) -> dict[str, Value]:
        """Returns the values among which that of a name was logged last."""
        flight = self._flight
        if flight is None or flight.now is None or name not in flight.now.values:
            return self._values
        values = flight.now.values
        values[name] = self._as_value(name, flight.fetch(values[name]))
        return values

    def stop(self, reason: str = "it was asked to") -> None:
        """Has the training end with this step, on all workers."""
        self.reason = self.reason or reason

    def save(self) -> None:
        """Has a checkpoint be saved at the end of this step, on all workers.

        Raises:
            StrategyError: there is nothing to save with.
        """
        if self.manager is None:
            raise StrategyError(
                "there is nothing to save with; pass Training(..., "
                "checkpoint=mirror.CheckpointManager(...))"
            )
        self._is_to_save = True

    def will_end_at(self, step: int) -> None:
        """Notes where the training ends, for what shows how far it is; the earliest counts."""
        self.last_step = step if self.last_step is None else min(step, self.last_step)

    def _check_open(self) -> None:
        if not self._is_open:
            raise StrategyError(
                "a Training is used inside its with statement: with Training(strategy, ...) as "
                "training: for batch in training.batches(dataset): ..."
            )
