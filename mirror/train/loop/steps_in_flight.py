"""StepsInFlight: scheduled steps of a loop that workers of parameter servers still run.

Problem: a loop that waits for each step before it schedules the next one keeps one worker busy.
Rule: the loop may be some steps ahead of the workers. A step is everything that one pass of the
loop has scheduled. It ends when all of that has ended; then its values have arrived, and hooks see
it, in the order of the passes. All steps in flight end before a checkpoint is saved, before the
next pass if a hook waits for this step (``Hook.waits_for``), and before the training ends.
Consequence: a checkpoint of step k has the updates of exactly k steps. The closure queue runs a
step of a lost worker again, and it stays one step. A step that raised, or that was not run because
another one raised, raises here and is never counted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from mirror.errors import ActorDied, StrategyError
from mirror.server.roles.closure_queue import Closure, RemoteValue
from mirror.server.roles.coordinator import ClusterCoordinator, session_of
from mirror.strategy.parameter_server import ParameterServerStrategy
from mirror.threads.user_frames import warn_user

_STEPS_PER_WORKER = 2  # one runs, one is queued


@dataclass
class LoopStep:
    """The closures that one pass of the loop has scheduled, and the values it has logged."""

    scheduled: list[Closure] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)


class StepsInFlight:
    """The steps of a training that have begun and not ended, the oldest first.

    The constructor starts servers and workers, unless a ``ClusterCoordinator`` has done so.

    Attributes:
        now: the current pass of the loop, if there is one.
    """

    def __init__(self, strategy: ParameterServerStrategy) -> None:
        self._coordinator = ClusterCoordinator(strategy)
        self._session = session_of(self._coordinator)
        self._limit = _STEPS_PER_WORKER * strategy.num_workers
        self._left: deque[LoopStep] = deque()
        self._is_warned = False
        self.now: LoopStep | None = None
        self.num_datasets = self._session.num_datasets
        """The number of per-worker datasets that were created before the training began."""

    def listen(self) -> None:
        """Starts to record the closures that the passes of the loop schedule."""
        self._session.queue.listeners.append(self._record)

    def close(self) -> None:
        """Stops recording; idempotent."""
        self.now = None
        if self._record in self._session.queue.listeners:
            self._session.queue.listeners.remove(self._record)

    def _record(self, step: Closure) -> None:
        now = self.now
        if now is not None:
            now.scheduled.append(step)

    def begin(self) -> None:
        """Begins a pass of the loop."""
        self.now = LoopStep()

    def leave(self) -> None:
        """Ends the pass of the loop; its closures may still run."""
        assert self.now is not None
        self._left.append(self.now)
        self.now = None

    def __len__(self) -> int:
        return len(self._left)

    @property
    def is_full(self) -> bool:
        """Whether the loop must not get further ahead of the workers."""
        return len(self._left) >= self._limit

    @property
    def has_first_ended(self) -> bool:
        """Whether the oldest step has ended."""
        return bool(self._left) and all(step.ended.is_set() for step in self._left[0].scheduled)

    def take(self) -> dict[str, Any]:
        """Waits for the oldest step, and returns the values that its pass has logged.

        Raises:
            BaseException: the error of one of its closures.
            ServerLostError: a server is lost.
            StrategyError: the dataset of a worker has ended; or a closure was not run.
        """
        first = self._left.popleft()
        for step in first.scheduled:
            self.fetch(RemoteValue(step))
        return {name: self.fetch(value) for name, value in first.values.items()}

    def fetch(self, value: Any) -> Any:
        """Returns a value; waits for a RemoteValue. Raises as ``take``."""
        if not isinstance(value, RemoteValue):
            return value
        try:
            return value.fetch()
        except Exception as failed:
            error: BaseException = failed
        try:
            self._session.queue.check()  # the coordinator raises each error once: here
        except Exception as first:
            error = first
        if isinstance(error, StopIteration):
            raise dataset_ended_error() from error
        raise error

    def join(self) -> None:
        """Waits for all scheduled closures. Raises as ``take``."""
        try:
            with self.naming_losses():
                self._coordinator.join()
        except StopIteration as error:
            raise dataset_ended_error() from error

    def settle(self, step: int) -> None:
        """Waits as ``join``, and warns if a checkpoint would lack gradients."""
        self.join()
        with self.naming_losses():
            num_lacking, to_aggregate = self._session.num_held_back()
        if num_lacking and not self._is_warned:
            self._is_warned = True
            warn_user(
                f"the checkpoint of step {step} lacks {num_lacking} gradients, which wait on the "
                f"servers for an update of {to_aggregate}; save and stop at multiples of "
                f"replicas_to_aggregate={to_aggregate}"
            )

    @contextmanager
    def naming_losses(self) -> Iterator[None]:
        """Raises ServerLostError if the block fails because a server is lost."""
        try:
            yield
        except ActorDied:
            self._session.check_servers()
            raise


def dataset_ended_error() -> StrategyError:
    """Returns the error for the StopIteration of a closure."""
    return StrategyError(
        "a worker's dataset has ended in a step, while others may have batches left; let the "
        "function of create_per_worker_dataset begin again (while True: yield from loader), and "
        "end the training by StopAtStep(last_step)"
    )
