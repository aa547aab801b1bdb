"""ClusterCoordinator: schedules steps on the workers of a ParameterServerStrategy."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from mirror.base.no_copy import NoCopy
from mirror.errors import StrategyError, short_repr
from mirror.server.roles.closure_queue import QUEUE_SIZE
from mirror.server.roles.remote_value import RemoteValue
from mirror.server.roles.worker_datasets import PerWorkerDataset
from mirror.values import PerReplica

if TYPE_CHECKING:
    from mirror.server.roles.session import Session


class Served(Protocol):
    """A strategy over servers and workers."""

    coordinator: Any

    def begin_session(self, queue_size: int) -> Session:
        """Starts servers and workers."""

    def check_usable(self, what: str) -> None:
        """Raises StrategyError after ``close``, and inside ``run`` of another strategy."""


class ClusterCoordinator(NoCopy):
    """Sends steps to workers, which run them beside each other; one per strategy.

    ::

        coordinator = mirror.ClusterCoordinator(strategy)
        data = coordinator.create_per_worker_dataset(make_loader)
        losses = [coordinator.schedule(step, args=(data,)) for _ in range(1000)]
        coordinator.join()
        print(coordinator.fetch(losses[-1]))

    A step runs at least once: if its worker is lost, another one runs it again, and what it has
    pushed counts once. A second coordinator of a strategy is the first one.

    Args:
        strategy: a ``ParameterServerStrategy``; its servers and workers are started now.
        queue_size: how many steps may wait; beyond, ``schedule`` does.

    Raises:
        TypeError: another kind of strategy.
        ValueError: a queue that holds nothing.
    """

    _instead = "it belongs to the process whose strategy it has; a step cannot schedule others"
    _session: Session

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
            made = super().__new__(cls)
            made._session = strategy.begin_session(queue_size)
            made._strategy = strategy
            strategy.coordinator = made
        coordinator: ClusterCoordinator = strategy.coordinator
        return coordinator

    _strategy: Served

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
        """Queues ``fn(*args, **kwargs)`` for the next free worker and returns at once.

        It waits while the queue is full, and after the program has changed the model, until the
        steps before have ended. Modules and optimizers of the strategy may be anywhere in ``fn``
        and its arguments; a per-worker dataset among the arguments is the worker's next batch.

        Raises:
            BaseException: what a step scheduled before has raised; raised once, and steps that
                waited then are not run. Of several that fail beside each other, the first.
            ServerLostError: a server is gone.
            StepError: ``fn`` cannot be sent to a worker; what of it is named.
            TypeError: ``fn`` is not a function, or an async one or a generator.
            ValueError: a RemoteValue is among the arguments, a dataset of another coordinator,
                or PerWorkerValues for another number of workers.
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
        _refuse_parts((*args, *(kwargs or {}).values()))
        return self._session.schedule(fn, args, kwargs or {})

    def join(self) -> None:
        """Waits until all scheduled steps have ended; the model is up to date then.

        Raises:
            As ``schedule``.
        """
        self._strategy.check_usable("join")
        self._session.join()

    def done(self) -> bool:
        """Whether all scheduled steps have ended; raises as ``schedule``."""
        self._session.dispatch.check()
        return not self._session.dispatch.is_busy()

    def fetch(self, values: Any) -> Any:
        """Returns a structure with what its RemoteValues stand for; waits for them.

        Raises:
            BaseException: what one of these steps has raised.
            ServerLostError: a server is gone, and a step had not ended.
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
        """Gives every worker a dataset of its own.

        Args:
            dataset: a function of nothing, or of an InputContext (``num_input_pipelines``
                workers, of which this is ``input_pipeline_id``), that returns something to
                iterate over: each worker calls it, with a random stream of its own, when the
                first step asks for a batch, and again when it was lost. Or a dataset, of which
                each worker gets a copy.

        Raises:
            TypeError: neither.
            ValueError: it holds the strategy's model or optimizer.
        """
        if not callable(dataset) and not hasattr(dataset, "__iter__"):
            raise TypeError(
                "create_per_worker_dataset takes a dataset, or a function that returns one; got "
                f"{short_repr(dataset)}"
            )
        self._strategy.check_usable("create_per_worker_dataset")
        return self._session.create_dataset(dataset)


def session_of(coordinator: ClusterCoordinator) -> Session:
    """Returns what a coordinator schedules steps on."""
    return coordinator._session


def _refuse_parts(values: Sequence[Any]) -> None:
    for value in values:
        if isinstance(value, PerReplica):
            raise StrategyError(
                "a PerReplica belongs to the replicas of another strategy; a step on a worker "
                "takes plain values, and mirror.server.PerWorkerValues"
            )
