"""ClusterCoordinator, which schedules steps on the workers of a strategy, and its session.

The ``Session`` has the servers, workers, variables and steps of one ParameterServerStrategy.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from mirror.base.process_bound import NoCopy
from mirror.errors import StrategyError, short_repr
from mirror.server.cluster_tasks import Settings
from mirror.server.persistent_ids import PersistentId, dump, dump_step, load_pickled, names_in
from mirror.server.recorded_model import RecordedModules
from mirror.server.roles.actor_pool import ActorPool
from mirror.server.roles.closure_queue import QUEUE_SIZE, Closure, ClosureQueue, RemoteValue
from mirror.server.roles.server_variables import ServerVariables
from mirror.server.roles.worker_datasets import (
    PerWorkerDataset,
    PerWorkerIterator,
    PerWorkerValues,
)
from mirror.server.servers_report import ServersReport, Traffic
from mirror.server.shard import PushResult
from mirror.threads.user_frames import add_note
from mirror.values import PerReplica


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


class _Sent:
    """The state that was sent to a worker's process."""

    def __init__(self) -> None:
        self.generation = -1
        self.options: dict[int, bytes] = {}
        self.datasets: set[int] = set()


class Session:
    """Everything behind a ``ClusterCoordinator``.

    Args:
        is_strategy: returns whether an object is the strategy.
    """

    def __init__(
        self,
        settings: Settings,
        recorded: RecordedModules,
        is_strategy: Callable[[Any], bool],
        queue_size: int,
    ) -> None:
        self._settings, self._is_strategy = settings, is_strategy
        self.actors = ActorPool(
            settings.engine, settings.num_servers, settings.num_workers, settings.timeout_seconds
        )
        self._datasets: list[bytes] = []
        self._owner = object()  # identifies this session in datasets, which must not keep it alive
        self._traffic, self._seconds = Traffic(), 0.0
        self._lock, self._lock_numbers = threading.RLock(), threading.Lock()
        self._sent = [_Sent() for _ in range(settings.num_workers)]
        self.queue = ClosureQueue(
            settings.num_workers,
            self._run,
            self._restart,
            to_aggregate=settings.to_aggregate,
            queue_size=queue_size,
        )
        self.variables = ServerVariables(
            settings, recorded, self.actors, self.queue.wait, self.queue.is_busy
        )
        self.actors.on_lost(self._record_loss)
        if self.actors.lost is not None:
            self._record_loss()

    def _record_loss(self) -> None:
        assert self.actors.lost is not None
        self.queue.fail(self.actors.lost)

    # - Scheduling

    def schedule(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> RemoteValue:
        """Queues a step; see ``ClusterCoordinator.schedule``."""
        self.queue.check()
        with self._lock:
            self._flush()
            datasets: list[int] = []

            def name_of(thing: Any) -> str:
                names = [name for name, value in names_in(fn, args, kwargs) if value is thing]
                return repr(names[0]) if names else "an object without a name"

            def find(thing: Any) -> PersistentId | None:
                if isinstance(thing, PerWorkerDataset):
                    datasets.append(self._index_of(thing))
                    return ("dataset", thing.index)
                if isinstance(thing, PerWorkerIterator):
                    datasets.append(self._index_of(thing.dataset))
                    return ("iterator", thing.dataset.index)
                if isinstance(thing, PerWorkerValues):
                    self._check_values(thing)
                if isinstance(thing, RemoteValue):
                    raise ValueError(
                        "a RemoteValue cannot be an argument of a step; fetch it first: "
                        "coordinator.fetch(value)"
                    )
                if self._is_strategy(thing):
                    return ("strategy", 0)
                return self.variables.persistent_id(thing, name_of)

            data = dump_step(fn, tuple(args), kwargs, find)
            flags = self.variables.flags()

            def make(number: int) -> Closure:
                return Closure(number, data, flags, tuple(dict.fromkeys(datasets)))

            return RemoteValue(self.queue.put(make))

    def _index_of(self, dataset: PerWorkerDataset) -> int:
        if dataset.owner is not self._owner:
            raise ValueError(
                "a per-worker dataset is read by the workers of the coordinator that created it; "
                "got another coordinator's; call create_per_worker_dataset of this one"
            )
        return dataset.index

    def _check_values(self, values: PerWorkerValues) -> None:
        count, given = self._settings.num_workers, len(values.values)
        if given != count:
            raise ValueError(
                f"PerWorkerValues has a value for each of {count} workers; got {given}"
            )

    def _flush(self) -> None:
        try:
            self.variables.flush()
        except BaseException:
            self.queue.check()  # a lost server is the cause of other errors
            self.actors.check()
            raise

    @property
    def num_datasets(self) -> int:
        """The number of per-worker datasets."""
        return len(self._datasets)

    def create_dataset(self, dataset: Any) -> PerWorkerDataset:
        """Registers a dataset; each worker creates its own when a step first asks for it."""

        def find(thing: Any) -> PersistentId | None:
            persistent_id = self.variables.persistent_id(thing, short_repr)
            if persistent_id is not None or self._is_strategy(thing):
                raise ValueError(
                    f"the dataset of a worker holds {short_repr(thing)} of the strategy; create "
                    "batches from data only, and use the model in the step"
                )
            return None

        self.queue.check()
        with self._lock:
            self._datasets.append(dump(dataset, find))
            return PerWorkerDataset(len(self._datasets) - 1, self._owner)

    def join(self) -> None:
        """Waits for all steps, and then pulls the variables."""
        self.queue.wait()
        try:
            self.variables.refresh()
        except BaseException:
            self.actors.check()
            raise

    def num_held_back(self) -> tuple[int, int]:
        """Returns the number of gradients that wait for their update, and the number per update.

        The first is 0 if updates leave out slow workers' gradients, since a waiting gradient may
        be left out as well.
        """
        to_aggregate = self._settings.to_aggregate
        if to_aggregate is None or to_aggregate < self._settings.num_workers:
            return 0, to_aggregate or 1
        return self.report().num_waiting, to_aggregate

    def check_servers(self) -> None:
        """Raises ServerLostError if the server that could not be reached is lost."""
        self.queue.is_server_gone()
        self.actors.check()

    # - Running, in the threads of the queue

    def _run(self, worker: int, step: Closure, done_below: int) -> tuple[dict[str, Any], Any]:
        actor, sent = self.actors.workers[worker], self._sent[worker]
        variables = self.variables
        with variables.lock:
            generation, (header, buffers) = variables.generation, variables.set_up
            options = dict(enumerate(variables.options))
        if buffers and sent.generation != generation:
            actor.call("set_up", header, buffers).result()
            sent.generation, sent.options = generation, options
        for index, data in options.items():
            if sent.options.get(index) != data:
                actor.call("set_options", {"optimizer": index}, [data]).result()
                sent.options[index] = data
        for index in step.datasets:
            if index not in sent.datasets:
                answer, found = actor.call(
                    "make_dataset", {"index": index}, [self._datasets[index]]
                ).result()
                if answer["outcome"] == "raised":
                    return answer, self._load_error(found[0])
                sent.datasets.add(index)
        header = {
            "step": step.number,
            "attempt": step.attempt,
            "done_below": done_below,
            "flags": step.flags,
            "is_sync": self._settings.is_sync,
        }
        answer, result = actor.call("execute", header, [step.data]).result()
        with self._lock_numbers:
            self._traffic.add(answer["traffic"])
            self._seconds += answer["seconds"]
        if answer["outcome"] == "lost":
            self.actors.probe_servers()
        if answer["results"]:
            variables.mark_stale()
        if answer["outcome"] != "returned":
            return answer, self._load_error(result[0])
        return answer, load_pickled(result[0], self._resolve)

    def _resolve(self, persistent_id: PersistentId) -> Any:
        kind, index = persistent_id
        if kind == "module" and self.variables.model is not None:
            return self.variables.model.modules[index]
        return self.variables.optimizers[index].optimizer

    def _load_error(self, data: Any) -> BaseException:
        error: BaseException
        error, text = load_pickled(data, lambda persistent_id: None)
        add_note(error, f"where it was raised:\n{text}")
        return error

    def _restart(self, worker: int) -> None:
        self._sent[worker] = _Sent()
        self.actors.workers[worker].restart()

    # - Reports and the end

    def report(self) -> ServersReport:
        """Returns the counts of servers and workers."""
        numbers, _ = self.actors.servers[0].call("numbers").result()
        counts = numbers["counts"]
        client = self.variables.client
        updates = counts.get(PushResult.APPLIED, 0)
        # The last gradient of an update counts as applied, the ones before as gathered.
        used = updates * ((self._settings.to_aggregate or 1) - 1)
        waiting = counts.get(PushResult.GATHERED, 0) - used
        with self._lock_numbers:
            return ServersReport(
                num_steps=self.queue.num_ended,
                num_retried=self.queue.num_retried,
                num_updates=updates,
                num_dropped=counts.get(PushResult.DROPPED, 0),
                num_waiting=waiting if self._settings.is_sync else 0,
                staleness=dict(numbers["staleness"]),
                pulled_bytes=self._traffic.pulled_bytes,
                pushed_bytes=self._traffic.pushed_bytes,
                pull_seconds=self._traffic.pull_seconds,
                push_seconds=self._traffic.push_seconds,
                step_seconds=self._seconds,
                server_bytes=() if client is None else client.layout.sizes,
            )

    def close(self) -> None:
        """Stops the processes and threads."""
        self.queue.close()
        self.actors.close()

    def check_open(self) -> None:
        """Raises StrategyError after ``close``."""
        if self.queue.is_closed:
            raise StrategyError("this strategy is closed; make another one")
