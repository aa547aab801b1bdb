"""Replicas of a strategy, one Replica while its function runs, and views of its run."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Generic, NoReturn, Protocol, TypeVar

import torch
from torch import Tensor

from mirror.base.timeline import Timeline
from mirror.base.weak_registry import WeakRegistry
from mirror.comm.communicator import Communicator
from mirror.comm.workers.worker_group import LocalWorkerGroup
from mirror.device.device_mesh import DeviceMesh
from mirror.devices import is_simulated
from mirror.threads.lockstep import Lockstep, NullLockstep
from mirror.threads.merge_point import MergePoint

T = TypeVar("T")


class Replicas:
    """The replicas of one strategy in this process; replica r is on ``devices[r]``.

    A replica id is never inferred from a device. The identity of this object shows to which
    strategy a variable or a replica belongs. Of replicas in other processes, only the number is
    known: ``workers``.

    Attributes:
        communicator: moves data between the replicas.
        workers: the processes that train together; a single one in most programs.
        places: the device mesh; ``devices`` are those at position 0. See [Note: Places].
        mirrors: whether there is more than one replica, here or in other processes.
        names: the replicas' names in messages, ``"replica 2 of 4 (cuda:2)"``.
        strategy: the strategy of the replicas. A strong reference, because a model may outlive
            the variable that held its strategy.
        weighted: whether gradients are means, weighted by the replicas' shares, or plain sums.
        is_nested: whether a replica of another strategy has created them.
        device_types: the types of the devices, and ``"cpu"``.
        are_simulated: whether the devices are CPU devices.
        is_one_device: whether all replicas are on one device.
        parameter_device: holds the parameters in the cross-replica context; optimizers step there.
        has_parameter_device: whether that is a storage of its own, and not the first replica's.
        steps_once: whether one optimizer step serves all replicas.
        shards_state: whether each replica holds a part of the optimizers' state, and updates it.
    """

    __slots__ = (
        "__weakref__",
        "are_simulated",
        "communicator",
        "device_types",
        "devices",
        "has_parameter_device",
        "is_nested",
        "is_one_device",
        "mirrors",
        "names",
        "num_replicas",
        "parameter_device",
        "places",
        "shards_state",
        "steps_once",
        "strategy",
        "timeline",
        "weighted",
        "workers",
    )

    def __init__(
        self,
        places: DeviceMesh,
        communicator: Communicator,
        *,
        strategy: Any,
        weighted: bool,
        is_nested: bool = False,
        workers: LocalWorkerGroup | None = None,
        home: torch.device | None = None,
        shards_state: bool = False,
    ) -> None:
        self.places, self.devices = places, places.positions[0]
        self.communicator = communicator
        self.num_replicas = len(self.devices)
        self.workers = workers = (
            LocalWorkerGroup(self.num_replicas) if workers is None else workers
        )
        self.has_parameter_device = home is not None
        self.parameter_device = self.devices[0] if home is None else home
        self.mirrors = workers.num_replicas > 1 or self.has_parameter_device
        worker = f"worker {workers.rank}, " if workers.is_multi_process else ""
        labels = [worker + ", ".join(map(str, devices)) for devices in places.replicas]
        self.names = tuple(
            f"replica {workers.replica_offset + r} of {workers.num_replicas} ({labels[r]})"
            for r in range(self.num_replicas)
        )
        self.strategy = strategy
        self.weighted = weighted
        self.is_nested = is_nested
        self.timeline = Timeline(self.names)
        self.device_types = tuple({"cpu", *(device.type for device in self.devices)})
        self.are_simulated = is_simulated(self.devices)
        self.is_one_device = len(set(self.devices)) == 1
        # Workers step alike, also one that has a single replica.
        self.shards_state = shards_state and workers.num_replicas > 1
        self.steps_once = (
            self.is_one_device and self.num_replicas > 1
        ) or self.has_parameter_device


class WeakReplicaMap(Generic[T]):
    """A map from ``Replicas`` to an object of theirs, with weak keys and weak values.

    The values are weak, too, because they hold strong references to their replicas.
    """

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[Replicas, weakref.ref[T]] = (
            weakref.WeakKeyDictionary()
        )
        self._owned: WeakRegistry[T] = WeakRegistry()

    def put(self, replicas: Replicas, owned: T) -> None:
        """Stores the object of these replicas."""
        self._known[replicas] = weakref.ref(owned)
        self._owned.add(owned)

    def get(self, replicas: Replicas) -> T:
        """Returns the object of these replicas, which must be in use."""
        owned = self._known[replicas]()
        assert owned is not None
        return owned

    def all(self) -> list[T]:
        """Returns all objects that are alive."""
        return list(self._owned)


class SwappedOptimizer(Protocol):
    """An optimizer that the step of one replica uses exclusively, with its parameters swapped."""

    def swap_out(self) -> None:
        """Swaps the replica's parameters out; idempotent."""

    def force_out(self) -> None:
        """Swaps out after a failure, whichever replica uses or waits for it; idempotent."""


class SteppedOptimizer(Protocol):
    """An optimizer that all replicas of a run have stepped."""

    def options(self) -> object:
        """Returns the options at the end of this replica's function."""

    def check_left(self, left: dict[int, Any]) -> None:
        """Raises StrategyError if the replicas' options differ at the end of a run."""


class Tracing(Protocol):
    """The tracer of a compiled step: one trace stands for all replicas.

    Traced tensors have no values and belong to no replica. Code that would wait for other
    replicas, or read values that differ between them, calls the tracer instead.
    """

    def all_reduce(self, op: str, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Returns placeholders for the tensors reduced over the replicas; differentiable."""

    def own_row(self, row: Tensor) -> Tensor:
        """Returns zeros with one row per replica, in which this replica's row is ``row``."""

    def refuse(self, what: str, remedy: str) -> NoReturn:
        """Raises the error for code that cannot be traced."""


class RunView(Protocol):
    """The shared state of a run, as a replica sees it.

    Attributes:
        is_split: whether this is the run of a split call, written for the whole batch.
        is_given: whether the program has set weights.
        counts: the number of examples of each replica, if the batch was split.
    """

    is_split: bool
    is_given: bool
    counts: Sequence[float] | None

    @property
    def replicas(self) -> Replicas:
        """The replicas of the run's strategy."""

    @property
    def stepped(self) -> dict[SteppedOptimizer, dict[int, object]]:
        """The optimizers that all replicas have stepped, with the options of each replica."""

    @property
    def assigned(self) -> dict[Any, bool]:
        """The variables that replicas have assigned; True if values, not just flags."""

    @property
    def modes(self) -> dict[int, tuple[object, dict[int, bool]]]:
        """The modes that replicas have set, by ``id`` of the module."""

    @property
    def is_default(self) -> bool:
        """Whether this is the run of code without a strategy."""

    @property
    def active(self) -> tuple[int, ...]:
        """The ids of the replicas that take part."""

    @property
    def lockstep(self) -> Lockstep | NullLockstep:
        """The lockstep that gives the replicas their turns."""

    def merge(self, replica_id: int, point: MergePoint) -> Any:
        """Waits for all replicas; the action runs once; returns the result of this replica."""

    def enter_first_stream(self) -> None:
        """Makes a merge draw from the first replica's stream, as one device would."""

    def shares(self) -> dict[int, float]:
        """Returns the share of each replica's gradient."""

    def weights(self) -> dict[int, float]:
        """Returns the weights of the active replicas."""

    def all_weights(self) -> Sequence[float] | None:
        """Returns the weights of all replicas, 0 for idle ones; ``None`` if there are none."""


class Replica:
    """One replica while its function runs; ``current.replica`` is one.

    Attributes:
        run: the run that it takes part in.
        device: holds its variables.
        weight: its weight in the gradient mean and in ``strategy.reduce("mean", ...)``.
        lent: the optimizers that its step uses.
        has_begun: whether its function has been called.
        context: its ``ReplicaContext``, created when the user first asks for it.
        tracing: the tracer of its code, while a step is compiled.
    """

    __slots__ = (
        "context",
        "device",
        "has_begun",
        "lent",
        "replica_id",
        "replicas",
        "run",
        "tracing",
        "weight",
    )

    def __init__(self, replicas: Replicas, run: RunView, replica_id: int, weight: float) -> None:
        self.replicas = replicas
        self.run = run
        self.replica_id = replica_id
        self.device = replicas.devices[replica_id]
        self.weight = weight
        self.lent: list[SwappedOptimizer] = []
        self.has_begun = False
        self.context: Any = None
        self.tracing: Tracing | None = None

    def give_back(self) -> None:
        """Swaps out the optimizers of a step that raised."""
        while self.lent:
            self.lent[-1].swap_out()
            self.lent.pop()
