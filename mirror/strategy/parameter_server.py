"""ParameterServerStrategy: variables on servers, steps on workers, synchronous or not."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch
from torch import nn

from mirror.base.migration_hints import attribute_error, init_with_hints
from mirror.base.process_bound import NoCopy
from mirror.comm.reduce_ops import Op
from mirror.errors import StrategyError, short_repr
from mirror.execution.run import current
from mirror.server.recorded_model import RecordedModules
from mirror.server.variable_placement import Partitioner, PlacementFunction, check_placement
from mirror.strategy.distributed_values import check_call
from mirror.strategy.scope import PlacingScope
from mirror.values import PerReplica, is_int, is_real

if TYPE_CHECKING:
    from mirror.server.cluster_tasks import Tasks
    from mirror.server.engine.engine_types import Engine
    from mirror.server.roles.coordinator import Session
    from mirror.server.servers_report import ServersReport

ModuleT = TypeVar("ModuleT", bound=nn.Module)
_SCHEDULE = "schedule a step instead: mirror.ClusterCoordinator(strategy).schedule(step)"

# Members of other strategies that have no meaning here, and alternatives.
_REMEDIES = {
    "compile": "apply torch.compile to the model inside the step",
    "distribute_dataset": "use ClusterCoordinator.create_per_worker_dataset",
    "distribute_dataset_from_function": "use ClusterCoordinator.create_per_worker_dataset",
    "distribute_values_from_function": "use mirror.server.PerWorkerValues(values)",
    "no_sync": "call optimizer.step() once for several backward passes of a step",
    "check_replicas": "there is one copy of each variable, on its server",
    "trace": "strategy.report() says how long pulls and pushes take",
}


@init_with_hints
class ParameterServerStrategy(NoCopy):
    """Keeps variables on parameter servers; workers run steps that are scheduled on them.

    ::

        strategy = mirror.ParameterServerStrategy(num_servers=2, num_workers=4)
        with strategy.scope():
            model = Net()
            optimizer = torch.optim.AdamW(model.parameters())

        def step(batch):
            x, y = batch
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            return loss.item()

        coordinator = mirror.ClusterCoordinator(strategy)
        data = coordinator.create_per_worker_dataset(make_loader)
        losses = [coordinator.schedule(step, args=(data,)) for _ in range(1000)]
        coordinator.join()

    In a step, the model is the worker's copy, which pulls values before they are read.
    ``optimizer.step()`` sends gradients to the servers, which hold the optimizer's state. In this
    process, reads of the model return the servers' values, and writes reach the servers. See
    docs/servers.md.

    Args:
        num_servers, num_workers: the numbers of processes, unless ``cluster`` is given.
        cluster: a ``mirror.cluster.ClusterSpec``, a dict, or a resolver, with the jobs "ps",
            "worker" and perhaps "chief": the addresses of ``mirror.server.Server`` processes, one
            for each task. All processes need the same key in MIRROR_ENGINE_KEY.
        engine: the kind of processes: ``"process"`` on this machine; ``"ray"`` for actors;
            ``"auto"`` chooses; or an engine.
        sync: whether an update is the mean of several gradients of the same values, weighted by
            examples; otherwise each gradient is applied when it arrives.
        replicas_to_aggregate: the number of gradients in an update; by default one for each
            worker. With fewer, the slowest workers' gradients are dropped; with more, workers
            contribute several.
        max_staleness: without ``sync``, the number of updates after which a gradient is dropped.
        partitioner: cuts variables into pieces along their first axis: ``mirror.server``'s
            ``FixedShards``, ``MinSize``, ``MaxSize``, or a function of shape and dtype.
        placement: ``"round_robin"``, ``"largest_first"``, or a function of name, shape, dtype
            and the number of servers that returns a server's index.
        timeout_seconds: the limit for a step. A worker that takes longer is replaced, and the
            step runs again. A server that leaves a call unanswered for half of it is lost, and
            raises ``ServerLostError``.

    Raises:
        ValueError: a number is not positive; an option does not fit ``sync``; jobs have other
            names, or there is no ps, worker or address.
        StrategyError: the resolver states that this process is a server or a worker.
    """

    _instead = "a step that is scheduled may use it"

    def __init__(
        self,
        num_servers: int | None = None,
        num_workers: int | None = None,
        *,
        cluster: Any = None,
        engine: str | Engine[Any] = "auto",
        sync: bool = False,
        replicas_to_aggregate: int | None = None,
        max_staleness: int | None = None,
        partitioner: Partitioner | None = None,
        placement: str | PlacementFunction = "round_robin",
        timeout_seconds: float = 600.0,
    ) -> None:
        _check_engine(engine)
        self._tasks = None
        if cluster is not None:
            self._tasks = tasks = _resolve_tasks(cluster, engine, (num_servers, num_workers))
            num_servers, num_workers = len(tasks.servers), len(tasks.workers)
        self._num_servers = _check_at_least(
            "num_servers", 1 if num_servers is None else num_servers
        )
        self._num_workers = _check_at_least(
            "num_workers", 1 if num_workers is None else num_workers
        )
        if not isinstance(sync, bool):
            raise ValueError(f"sync must be a bool, got {short_repr(sync)}")
        if replicas_to_aggregate is not None:
            _check_at_least("replicas_to_aggregate", replicas_to_aggregate)
            if not sync:
                raise ValueError(
                    f"replicas_to_aggregate={replicas_to_aggregate} works with synchronous "
                    "updates only; pass sync=True, or leave it out to apply each gradient when it "
                    "arrives"
                )
        if max_staleness is not None:
            if sync:
                raise ValueError(
                    "max_staleness works with asynchronous updates only; with sync=True every "
                    "gradient of older values is dropped"
                )
            _check_at_least("max_staleness", max_staleness, least=0)
        if partitioner is not None and not callable(partitioner):
            raise ValueError(
                "partitioner must be mirror.server's FixedShards(n), MinSize(...) or MaxSize(...),"
                f" or a function of shape and dtype; got {short_repr(partitioner)}"
            )
        check_placement(placement)
        if not is_real(timeout_seconds) or not 0 < timeout_seconds < float("inf"):
            raise ValueError(
                f"timeout_seconds must be a positive number, got {short_repr(timeout_seconds)}"
            )
        self._timeout_seconds = float(timeout_seconds)
        self._engine = engine
        self._to_aggregate = (replicas_to_aggregate or self._num_workers) if sync else None
        self._max_staleness = max_staleness
        self._partitioner, self._placement = partitioner, placement
        self._recorded = RecordedModules()
        self._session: Session | None = None
        self._is_closed = False
        self.coordinator: Any = None

    # Properties

    @property
    def num_servers(self) -> int:
        """The number of parameter servers."""
        return self._num_servers

    @property
    def num_workers(self) -> int:
        """The number of workers."""
        return self._num_workers

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of gradients in an update: 1 without ``sync=True``."""
        return self._to_aggregate or 1

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The device of the model in this process."""
        return (torch.device("cpu"),)

    @property
    def backend(self) -> str:
        """The name of the engine."""
        return self._engine if isinstance(self._engine, str) else type(self._engine).__name__

    def __repr__(self) -> str:
        how = f"sync of {self._to_aggregate}" if self._to_aggregate else "async"
        return (
            f"ParameterServerStrategy(num_servers={self._num_servers}, "
            f"num_workers={self._num_workers}, {how})"
        )

    # Variables

    def scope(self) -> PlacingScope:
        """Makes this strategy current; the variables of modules created inside are on servers.

        Raises:
            StrategyError: it is entered inside another strategy's scope or ``run``, or after
                ``close``.
        """
        return PlacingScope(self, self._recorded, self.check_usable)

    def mirror(self, module: ModuleT) -> ModuleT:
        """Records an existing module (a pretrained one), and returns it.

        Raises:
            TypeError: the argument is not a module.
        """
        self.check_usable("mirror")
        if not isinstance(module, nn.Module):
            raise TypeError(f"mirror takes a torch.nn.Module, got a {type(module).__name__}")
        self._recorded.add(module)
        return module

    # Running

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Calls ``fn`` in this process, and warns, since a coordinator schedules steps.

        It is meant for steps that run on a worker: there it calls ``fn`` without a warning.
        """
        self._warn("run")
        check_call(fn, args, kwargs)
        return fn(*args, **(kwargs or {}))

    def reduce(self, op: Op, value: Any, axis: int | None = None) -> Any:
        """Returns the value, reduced over ``axis``, and warns like ``run``."""
        self._warn("reduce")
        if axis is None or not isinstance(value, torch.Tensor):
            return value
        name = str(getattr(op, "value", op)).lower()
        if name not in ("sum", "mean"):
            raise ValueError(f"op must be 'sum' or 'mean', got {short_repr(op)}")
        return value.mean(axis) if name == "mean" else value.sum(axis)

    def gather(self, value: Any, axis: int = 0) -> Any:
        """Returns the value itself, and warns like ``run``."""
        self._warn("gather")
        return value

    def local_results(self, value: Any) -> tuple[Any, ...]:
        """Returns a 1-tuple of the value, or the parts of a PerReplica."""
        if not isinstance(value, PerReplica):
            return (value,)
        return tuple(part for _, part in value.parts())

    def report(self) -> ServersReport:
        """Returns counts of steps, updates and bytes, times, and the staleness of gradients.

        Raises:
            ServerLostError: a server is lost.
        """
        from mirror.server.servers_report import ServersReport

        self.check_usable("report")
        return ServersReport() if self._session is None else self._session.report()

    # Servers and workers

    def begin_session(self, queue_size: int) -> Session:
        """Starts servers and workers, for the first ``ClusterCoordinator``."""
        from mirror.server.cluster_tasks import Settings
        from mirror.server.roles.coordinator import Session

        self.check_usable("ClusterCoordinator")
        settings = Settings(
            self._num_servers,
            self._num_workers,
            self._engine if self._tasks is None else _make_engine(self._tasks),
            self._to_aggregate,
            self._max_staleness,
            self._partitioner,
            self._placement,
            self._timeout_seconds,
        )
        own = weakref.ref(self)
        session = Session(settings, self._recorded, lambda thing: thing is own(), queue_size)
        weakref.finalize(self, session.close)
        self._session = session
        return session

    def close(self) -> None:
        """Ends servers and workers. Idempotent. The model keeps the last values.

        Steps that have not finished are cancelled: call ``join`` first.
        """
        if not self._is_closed:
            self._is_closed = True
            if self._session is not None:
                self._session.close()

    def check_usable(self, what: str) -> None:
        """Raises StrategyError after ``close``, and inside ``run`` of another strategy."""
        if self._is_closed:
            raise StrategyError(f"{what}: this strategy is closed; make another one")
        if current.replica is not None:
            raise StrategyError(
                f"{what} of {self!r} was called inside run of another strategy; call it outside"
            )

    def _warn(self, what: str) -> None:
        self.check_usable(what)
        warnings.warn(
            f"strategy.{what} was called outside of a step that ClusterCoordinator has scheduled, "
            f"so it runs in this process, not on a worker; {_SCHEDULE}",
            UserWarning,
            stacklevel=3,
        )

    def __enter__(self) -> ParameterServerStrategy:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> NoReturn:
        kind = type(self).__name__
        if name in _REMEDIES:
            raise StrategyError(
                f"a {kind} has no {name}, which concerns replicas; {_REMEDIES[name]}"
            )
        raise attribute_error(self, name)


def _resolve_tasks(cluster: Any, engine: object, counts: Sequence[object]) -> Tasks:
    """Returns the addresses of a cluster's servers and workers.

    Raises:
        ValueError: as ``mirror.server.cluster_tasks``; or counts or an engine are also given.
    """
    from mirror.server import cluster_tasks

    if any(count is not None for count in counts):
        raise ValueError("cluster= sets num_servers and num_workers; give either it or these")
    found = cluster_tasks.tasks_of(cluster)
    if engine != "auto":
        raise ValueError(
            f"engine={short_repr(engine)} starts servers and workers itself, but cluster= names "
            "running mirror.server.Server processes; leave out engine=, or give "
            f"num_servers={len(found.servers)}, num_workers={len(found.workers)}"
        )
    return found


def _make_engine(cluster_tasks: Tasks) -> Engine[Any]:
    """Returns the engine with an actor at the address of each of a cluster's tasks.

    Raises:
        WireError: there is no key.
    """
    from mirror.server.engine.node_agents import AgentEngine
    from mirror.server.engine.socket_client import key_of_environment

    return AgentEngine(cluster_tasks.addresses_by_name(), key_of_environment())


def _check_at_least(name: str, value: object, least: int = 1) -> int:
    """Returns the value; raises ValueError if it is not an integer, or too small."""
    if not is_int(value) or value < least:
        raise ValueError(f"{name} must be an integer from {least} on, got {short_repr(value)}")
    return value


def _check_engine(engine: object) -> None:
    """Raises ValueError if a value is neither an engine nor the name of one."""
    names = ("auto", "process", "ray")
    if engine not in names and not hasattr(engine, "start"):
        raise ValueError(
            f"engine must be one of {', '.join(map(repr, names))}, or an engine; got "
            f"{short_repr(engine)}"
        )
