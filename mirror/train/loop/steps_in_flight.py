"""StepsInFlight: the steps of a loop that workers of parameter servers run meanwhile.

[Note: Steps in flight]
Problem: a loop that waits for each step before it schedules the next one keeps one worker busy.
Rule: the loop may be some steps ahead of the workers. A step is what one pass of the loop has
scheduled. It ends when all of that has ended; then its values are there, and hooks see it, in the
order of the passes. All steps in flight end before something is saved, before a pass whose step a
hook waits for (``Hook.waits_for``), and before the training ends.
Consequence: a checkpoint of step k has the updates of k steps, and of no others. A step whose
worker is lost is run again by the dispatch and stays one step. A step that raised, or that was
not run since another one raised, raises here: it is never counted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from mirror.errors import ActorDied, StrategyError
from mirror.server.roles.closure_queue import Closure
from mirror.server.roles.coordinator import ClusterCoordinator, session_of
from mirror.server.roles.remote_value import RemoteValue
from mirror.strategy.parameter_server import ParameterServerStrategy
from mirror.threads.user_frames import warn_user

_STEPS_PER_WORKER = 2  # one runs, one waits for the worker


@dataclass
class LoopStep:
    """What one pass of the loop has scheduled, and logged under a name."""

    scheduled: list[Closure] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)


class StepsInFlight:
    """The steps of a training that have begun and not ended, the oldest first.

    Making it starts servers and workers, unless a ``ClusterCoordinator`` has.

    Attributes:
        now: the pass of the loop that goes on, if one does.
    """

    def __init__(self, strategy: ParameterServerStrategy) -> None:
        self._coordinator = ClusterCoordinator(strategy)
        self._session = session_of(self._coordinator)
        self._limit = _STEPS_PER_WORKER * strategy.num_workers
        self._left: deque[LoopStep] = deque()
        self._is_warned = False
        self.now: LoopStep | None = None
        self.num_datasets = self._session.num_datasets
        """How many per-worker datasets were made before the training began."""

    def listen(self) -> None:
        """Notes from now on what the passes of the loop schedule."""
        self._session.queue.listeners.append(self._note)

    def close(self) -> None:
        """Notes no more; idempotent."""
        self.now = None
        if self._note in self._session.queue.listeners:
            self._session.queue.listeners.remove(self._note)

    def _note(self, step: Closure) -> None:
        now = self.now
        if now is not None:
            now.scheduled.append(step)

    def begin(self) -> None:
        """Begins a pass of the loop."""
        self.now = LoopStep()

    def leave(self) -> None:
        """Ends the pass of the loop; what it has scheduled may go on."""
        assert self.now is not None
        self._left.append(self.now)
        self.now = None

    def __len__(self) -> int:
        return len(self._left)

    @property
    def is_full(self) -> bool:
        """Whether the loop is far enough ahead of the workers."""
        return len(self._left) >= self._limit

    @property
    def has_first_ended(self) -> bool:
        """Whether the oldest step has ended."""
        return bool(self._left) and all(step.ended.is_set() for step in self._left[0].scheduled)

    def take(self) -> dict[str, Any]:
        """Waits for the oldest step, and returns what its pass has logged.

        Raises:
            BaseException: what one of its steps has raised.
            ServerLostError: a server is gone.
            StrategyError: a worker's dataset has ended; or a step was not run.
        """
        first = self._left.popleft()
        for step in first.scheduled:
            self.fetch(RemoteValue(step))
        return {name: self.fetch(value) for name, value in first.values.items()}

    def fetch(self, value: Any) -> Any:
        """Returns a value; that of a RemoteValue, for which it waits. Raises as ``take``."""
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
            raise dataset_ended() from error
        raise error

    def join(self) -> None:
        """Waits for all that was scheduled, by the loop or beside it. Raises as ``take``."""
        try:
            with self.named_losses():
                self._coordinator.join()
        except StopIteration as error:
            raise dataset_ended() from error

    def settle(self, step: int) -> None:
        """Waits as ``join``, and warns if a checkpoint of now lacks gradients."""
        self.join()
        with self.named_losses():
            num_lacking, to_aggregate = self._session.num_held_back()
        if num_lacking and not self._is_warned:
            self._is_warned = True
            warn_user(
                f"the checkpoint of step {step} lacks {num_lacking} gradients, which wait on the "
                f"servers for an update of {to_aggregate}; save and stop at multiples of "
                f"replicas_to_aggregate={to_aggregate}"
            )

    @contextmanager
    def named_losses(self) -> Iterator[None]:
        """Raises ServerLostError for what a lost server has made fail inside."""
        try:
            yield
        except ActorDied:
            self._session.check_servers()
            raise


def dataset_ended() -> StrategyError:
    """Returns what is raised for the StopIteration of a step."""
    return StrategyError(
        "a worker's dataset has ended in a step, while others may have batches left; let the "
        "function of create_per_worker_dataset begin again (while True: yield from loader), and "
        "end the training by StopAtStep(last_step)"
    )
