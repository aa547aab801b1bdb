"""ClusterCoordinator, which schedules steps on the workers of a ParameterServerStrategy."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from mirror.base.process_bound import NoCopy
from mirror.errors import StrategyError, short_repr
from mirror.server.roles.closure_queue import QUEUE_SIZE, RemoteValue
from mirror.server.roles.worker_datasets import PerWorkerDataset
from mirror.values import PerReplica

if TYPE_CHECKING:
    from mirror.server.roles.session import Session


class Served(Protocol):
    """A strategy over servers and workers, as the coordinator uses it."""

    coordinator: Any

    def begin_session(self, queue_size: int) -> Session:
        """Starts the servers and workers."""

    def check_usable(self, what: str) -> None:
        """Raises StrategyError after ``close``, and inside ``run`` of another strategy."""


class ClusterCoordinator(NoCopy):
    """Sends steps to workers, which run them concurrently.

    ::

        coordinator = mirror.ClusterCoordinator(strategy)
        data = coordinator.create_per_worker_dataset(make_loader)
        losses = [coordinator.schedule(step, args=(data,)) for _ in range(1000)]
        coordinator.join()
        print(coordinator.fetch(losses[-1]))

    A step runs at least once. If its worker is lost, another worker runs it again, and what it
    has pushed counts once. A strategy has one coordinator: a second construction returns the same
    object.

    Args:
        strategy: a ``ParameterServerStrategy``; this starts its servers and workers.
        queue_size: the number of steps that may wait; with more, ``schedule`` blocks.

    Raises:
        TypeError: the strategy is of another kind.
        ValueError: ``queue_size`` is not a positive integer.
    """

    _instead = "it belongs to the process of its strategy; a step cannot schedule others"
    _session: Session
    _strategy: Served

    def __new__(cls, strategy: Served, *, queue_size: int = QUEUE_SIZE) -> ClusterCoordinator:
        if not hasattr(type(strategy), "begin_session"):
            raise TypeError(
                "a ClusterCoordinator takes a mirror.ParameterServerStrategy, got "
                f"{short_repr(strategy)}; other strategies run steps with strategy.run"
            )
        if not isinstance(queue_size, int) or isinstance(queue_size, bool) or queue_size < 1:
            raise ValueError(
                f"queue_size must be an integer from 1 on, got {short_repr(queue_size)}"
            )
        if strategy.coordinator is None:
            created = super().__new__(cls)
            created._session = strategy.begin_session(queue_size)
            created._strategy = strategy
            strategy.coordinator = created
        coordinator: ClusterCoordinator = strategy.coordinator
        return coordinator

    @property
    def strategy(self) -> Any:
        """The strategy."""
        return self._strategy

    def schedule(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> RemoteValue:
        """Queues ``fn(*args, **kwargs)`` for the next free worker, and returns immediately.

        The call waits while the queue is full. If the program has changed the model, it waits
        until earlier steps have ended. ``fn`` and its arguments may refer to modules and
        optimizers of the strategy. A per-worker dataset among the arguments becomes the worker's
        next batch.

        Raises:
            BaseException: the error of an earlier step. It is raised once, and queued steps are
                not run. If several running steps fail, the first error is raised.
            ServerLostError: a server is lost.
            StepError: ``fn`` cannot be sent to a worker; the message names the reason.
            TypeError: ``fn`` is not a function, or it is async or a generator.
            ValueError: the arguments have a RemoteValue, a dataset of another coordinator, or
                PerWorkerValues for another number of workers.
        """
        if not callable(fn) or inspect.isclass(fn):
            raise TypeError(f"schedule takes a function, got {short_repr(fn)}")
        if inspect.isgeneratorfunction(fn) or inspect.iscoroutinefunction(fn):
            raise TypeError("schedule takes an ordinary function, no generator and no async one")
        if not isinstance(args, (tuple, list)):
            raise TypeError(f"args must be a tuple: args=(x,); got {short_repr(args)}")
        if kwargs is not None and not isinstance(kwargs, Mapping):
            raise TypeError(f"kwargs must be a dict, got {short_repr(kwargs)}")
        self._strategy.check_usable("schedule")
        _check_arguments((*args, *(kwargs or {}).values()))
        return self._session.schedule(fn, args, kwargs or {})

    def join(self) -> None:
        """Waits until all scheduled steps have ended; afterwards the model is up to date.

        Raises:
            The errors of ``schedule``.
        """
        self._strategy.check_usable("join")
        self._session.join()

    def done(self) -> bool:
        """Returns whether all scheduled steps have ended; raises as ``schedule``."""
        self._session.queue.check()
        return not self._session.queue.is_busy()

    def fetch(self, values: Any) -> Any:
        """Waits for the RemoteValues of a structure; returns the structure with their results.

        Raises:
            BaseException: the error of one of these steps.
            ServerLostError: a server was lost before a step had ended.
        """
        if isinstance(values, RemoteValue):
            return values.fetch()
        if isinstance(values, dict):
            return {name: self.fetch(value) for name, value in values.items()}
        if isinstance(values, tuple) and hasattr(values, "_fields"):
            return type(values)(*map(self.fetch, values))
        if type(values) in (tuple, list):
            return type(values)(map(self.fetch, values))
        return values

    def create_per_worker_dataset(self, dataset: Any) -> PerWorkerDataset:
        """Creates a dataset of which each worker has its own.

        Args:
            dataset: a function that returns an iterable, or an iterable that is copied to each
                worker. The function takes no argument or an InputContext, which has the number
                of workers (``num_input_pipelines``) and the worker's index
                (``input_pipeline_id``). Each worker calls it, with its own random state, when
                the first step asks for a batch, and again after a restart.

        Raises:
            TypeError: the argument is neither.
            ValueError: the argument refers to the strategy's model or optimizer.
        """
        if not callable(dataset) and not hasattr(dataset, "__iter__"):
            raise TypeError(
                "create_per_worker_dataset takes a dataset, or a function that returns one; got "
                f"{short_repr(dataset)}"
            )
        self._strategy.check_usable("create_per_worker_dataset")
        return self._session.create_dataset(dataset)


def session_of(coordinator: ClusterCoordinator) -> Session:
    """Returns the session of a coordinator."""
    return coordinator._session


def _check_arguments(values: Sequence[Any]) -> None:
    for value in values:
        if isinstance(value, PerReplica):
            raise StrategyError(
                "a PerReplica belongs to the replicas of another strategy; a step on a worker "
                "takes plain values, and mirror.server.PerWorkerValues"
            )
