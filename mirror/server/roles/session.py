"""Session: servers, workers, variables and steps of one strategy with a coordinator."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mirror.errors import StrategyError, short_repr
from mirror.server.cluster_tasks import Settings
from mirror.server.persistent_ids import PersistentId, dump, dump_step, load, names_in
from mirror.server.recorded_model import RecordedModules
from mirror.server.roles.actor_pool import ActorPool
from mirror.server.roles.closure_queue import Closure, ClosureQueue
from mirror.server.roles.remote_value import RemoteValue
from mirror.server.roles.server_variables import ServerVariables
from mirror.server.roles.worker_datasets import (
    PerWorkerDataset,
    PerWorkerIterator,
    PerWorkerValues,
)
from mirror.server.servers_report import ServersReport, Traffic
from mirror.threads.user_frames import add_note


class _Sent:
    """What a worker's process has been told."""

    def __init__(self) -> None:
        self.generation = -1
        self.options: dict[int, bytes] = {}
        self.datasets: set[int] = set()


class Session:
    """Everything but what the user holds.

    Args:
        stands_for: the strategy, by identity: tells whether an object is it.
    """

    def __init__(
        self,
        settings: Settings,
        recorded: RecordedModules,
        stands_for: Callable[[Any], bool],
        queue_size: int,
    ) -> None:
        self._settings, self._stands_for = settings, stands_for
        self.fleet = ActorPool(settings.engine, settings.num_servers, settings.num_workers)
        self._datasets: list[bytes] = []
        self._owner = object()  # of datasets, without keeping anything alive
        self._traffic, self._seconds = Traffic(), 0.0
        self._lock, self._lock_numbers = threading.RLock(), threading.Lock()
        self._sent = [_Sent() for _ in range(settings.num_workers)]
        self.dispatch = ClosureQueue(
            settings.num_workers,
            self._run,
            self._restart,
            to_aggregate=settings.to_aggregate,
            queue_size=queue_size,
        )
        self.variables = ServerVariables(
            settings, recorded, self.fleet, self.dispatch.wait, self.dispatch.is_busy
        )
        self.fleet.on_lost(self._note_lost)
        if self.fleet.lost is not None:
            self._note_lost()

    def _note_lost(self) -> None:
        assert self.fleet.lost is not None
        self.dispatch.fail(self.fleet.lost)

    # Scheduling

    def schedule(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> RemoteValue:
        """Queues a step."""
        self.dispatch.check()
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
                if self._stands_for(thing):
                    return ("strategy", 0)
                return self.variables.token(thing, name_of)

            data = dump_step(fn, tuple(args), kwargs, find)
            flags = self.variables.flags()

            def make(number: int) -> Closure:
                return Closure(number, data, flags, tuple(dict.fromkeys(datasets)))

            return RemoteValue(self.dispatch.put(make))

    def _index_of(self, dataset: PerWorkerDataset) -> int:
        if dataset.owner is not self._owner:
            raise ValueError(
                "a per-worker dataset is read by the workers of the coordinator that has made it; "
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
            self.dispatch.check()  # a lost server is told as that
            self.fleet.check()
            raise

    @property
    def num_datasets(self) -> int:
        """How many per-worker datasets were made."""
        return len(self._datasets)

    def create_dataset(self, dataset: Any) -> PerWorkerDataset:
        """Names a dataset that each worker makes when the first step asks for it."""

        def find(thing: Any) -> PersistentId | None:
            token = self.variables.token(thing, lambda thing: short_repr(thing))
            if token is not None or self._stands_for(thing):
                raise ValueError(
                    f"the dataset of a worker holds {short_repr(thing)} of the strategy; make "
                    "batches of data alone, and use the model in the step"
                )
            return None

        self.dispatch.check()
        with self._lock:
            self._datasets.append(dump(dataset, find))
            return PerWorkerDataset(len(self._datasets) - 1, self._owner)

    def join(self) -> None:
        """Waits for all steps; then what is here is up to date."""
        self.dispatch.wait()
        try:
            self.variables.refresh()
        except BaseException:
            self.fleet.check()
            raise

    def num_held_back(self) -> tuple[int, int]:
        """Returns how many gradients wait for others of their update, and of how many that is.

        0 where updates leave slow workers' gradients out: one that waits may be left out, too.
        """
        to_aggregate = self._settings.to_aggregate
        if to_aggregate is None or to_aggregate < self._settings.num_workers:
            return 0, to_aggregate or 1
        return self.report().num_waiting, to_aggregate

    def check_servers(self) -> None:
        """Raises ServerLostError if a server is gone, which could not be reached."""
        self.dispatch.is_server_gone()
        self.fleet.check()

    # Running, in the threads of the dispatch

    def _run(self, worker: int, step: Closure, done_below: int) -> tuple[dict[str, Any], Any]:
        actor, sent = self.fleet.workers[worker], self._sent[worker]
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
                    return answer, self._error(found[0])
                sent.datasets.add(index)
        about = {
            "step": step.number,
            "attempt": step.attempt,
            "done_below": done_below,
            "flags": step.flags,
            "is_sync": self._settings.is_sync,
        }
        answer, found = actor.call("execute", about, [step.data]).result()
        with self._lock_numbers:
            self._traffic.add(answer["traffic"])
            self._seconds += answer["seconds"]
        if answer["said"]:
            variables.note_push()
        if answer["outcome"] != "returned":
            return answer, self._error(found[0])
        return answer, load(found[0], self._thing)

    def _thing(self, token: PersistentId) -> Any:
        kind, index = token
        if kind == "module" and self.variables.model is not None:
            return self.variables.model.modules[index]
        return self.variables.optimizers[index].optimizer

    def _error(self, data: Any) -> BaseException:
        error: BaseException
        error, text = load(data, lambda token: None)
        add_note(error, f"where it was raised:\n{text}")
        return error

    def _restart(self, worker: int) -> None:
        self._sent[worker] = _Sent()
        self.fleet.workers[worker].restart()

    # The rest

    def report(self) -> ServersReport:
        """Returns counts of servers and workers."""
        numbers, _ = self.fleet.servers[0].call("numbers").result()
        counts = numbers["counts"]
        client = self.variables.client
        updates = counts.get("applied", 0)
        waiting = counts.get("gathered", 0) - updates * ((self._settings.to_aggregate or 1) - 1)
        with self._lock_numbers:
            return ServersReport(
                num_steps=self.dispatch.num_ended,
                num_retried=self.dispatch.num_retried,
                num_updates=updates,
                num_dropped=counts.get("dropped", 0),
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
        """Ends processes and threads."""
        self.dispatch.close()
        self.fleet.close()

    def check_open(self) -> None:
        """Raises StrategyError after ``close``."""
        if self.dispatch.is_closed:
            raise StrategyError("this strategy is closed; make another one")
