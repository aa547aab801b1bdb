"""Replicas: who the replicas of a strategy are, and one of them while its function runs."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from types import FrameType
from typing import Any, Generic, NoReturn, Protocol, TypeVar

import torch
from torch import Tensor

from mirror.base.timeline import Timeline
from mirror.comm.communicator import Communicator
from mirror.comm.workers.worker_group import LocalWorkerGroup
from mirror.device.device_mesh import DeviceMesh
from mirror.devices import is_simulated
from mirror.threads.lockstep import Lockstep, NullLockstep
from mirror.threads.merge_point import MergePoint

T = TypeVar("T")


class Replicas:
    """The replicas of one strategy: index r lives on ``devices[r]``, and beside it.

    An index is never inferred from a device. The identity of this object says whose a variable or
    a replica is.

    Those of other processes, where there are any, are known by their number alone: ``workers``.

    Attributes:
        communicator: how they move bytes to each other.
        workers: the processes whose replicas train together; this one is alone in most programs.
        places: all their devices; ``devices`` are those at position 0. See [Note: Places].
        mirrors: whether there is more than one replica, here or elsewhere.
        names: what messages call them, ``"replica 2 of 4 (cuda:2)"``.
        strategy: the strategy that runs them; strong, as a model outlives the variable that held
            its strategy.
        weighted: whether gradients are means, weighted by the replicas' shares, or plain sums.
        is_nested: whether a replica of another strategy has made them.
        device_types: the types of their devices, and ``"cpu"``.
        are_simulated: whether their devices are CPU devices.
        is_one_device: whether they are all on one device.
        home: where parameters are in the cross-replica context, and optimizers step.
        is_apart: whether that is a storage of its own; else it is the first replica's.
        steps_once: whether one step of an optimizer does for all, of several or apart from them.
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
        whose = f"worker {workers.rank}, " if workers.is_multi_process else ""
        where = [", ".join(map(str, row)) for row in places.replicas]
        self.names = tuple(
            f"replica {workers.replica_offset + r} of {workers.num_replicas} ({whose}{where[r]})"
            for r in range(self.num_replicas)
        )
        self.strategy = strategy
        self.weighted = weighted
        self.is_nested = is_nested
        self.timeline = Timeline(self.names)
        self.device_types = tuple({"cpu", *(device.type for device in self.devices)})
        self.are_simulated = is_simulated(self.devices)
        self.is_one_device = len(set(self.devices)) == 1
        self.steps_once = (
            self.is_one_device and self.num_replicas > 1
        ) or self.has_parameter_device


class WeakReplicaMap(Generic[T]):
    """What belongs to replicas and is found by them, as long as somebody else holds it.

    Weak on both sides: it holds its replicas.
    """

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[Replicas, weakref.ref[T]] = (
            weakref.WeakKeyDictionary()
        )

    def put(self, replicas: Replicas, owned: T) -> None:
        """Notes what belongs to replicas."""
        self._known[replicas] = weakref.ref(owned)

    def get(self, replicas: Replicas) -> T:
        """Returns what belongs to replicas that are in use."""
        owned = self._known[replicas]()
        assert owned is not None
        return owned

    def all(self) -> list[T]:
        """Returns all there is."""
        found = (known() for known in list(self._known.values()))
        return [owned for owned in found if owned is not None]


class SwappedOptimizer(Protocol):
    """What the step of a replica has for itself alone until the step ends: an optimizer."""

    def is_within_step(self, frame: FrameType) -> bool:
        """Whether ``frame`` was called by the step in progress."""

    def swap_out(self) -> None:
        """Ends the loan; idempotent."""

    def force_out(self) -> None:
        """Ends the loan, whoever has it or waits for it, after a failure; idempotent."""


class SteppedOptimizer(Protocol):
    """What all replicas of a run have stepped: an optimizer."""

    def options(self) -> object:
        """Returns the options as this replica leaves them."""

    def check_left(self, left: dict[int, Any]) -> None:
        """Raises StrategyError for options that the replicas have left different."""


class Tracing(Protocol):
    """Who follows what a replica does, to compile it: one trace stands for all replicas.

    What is traced has no values, and is of no replica: whoever would wait for others, or look at
    what differs between them, asks here instead.
    """

    def all_reduce(self, op: str, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Returns what stands for tensors reduced over the replicas; differentiable."""

    def own_row(self, row: Tensor) -> Tensor:
        """Returns a table of zeros with a row for each replica, of which its own is this."""

    def refuse(self, what: str, remedy: str) -> NoReturn:
        """Raises the error for what no trace can follow."""


class RunView(Protocol):
    """What the replicas of one run have in common, as one of them sees it.

    Attributes:
        is_split: whether it is that of a call that is split, written for the whole batch.
        is_given: whether the program has set weights.
        counts: the replicas' numbers of examples, if they have parts of a batch.
    """

    is_split: bool
    is_given: bool
    counts: Sequence[float] | None

    @property
    def replicas(self) -> Replicas:
        """Whose run it is."""

    @property
    def stepped(self) -> dict[SteppedOptimizer, dict[int, object]]:
        """The optimizers that all have stepped, and the options that each has left in them."""

    @property
    def assigned(self) -> dict[Any, bool]:
        """The variables that its replicas have assigned, and whether values."""

    @property
    def modes(self) -> dict[int, tuple[object, dict[int, bool]]]:
        """Of modules, by ``id``, the modes that its replicas have set."""

    @property
    def is_default(self) -> bool:
        """Whether it is that of code without a strategy, where nothing is distributed."""

    @property
    def active(self) -> tuple[int, ...]:
        """The replicas that take part."""

    @property
    def lockstep(self) -> Lockstep | NullLockstep:
        """What gives them their turns."""

    def merge(self, replica_id: int, point: MergePoint) -> Any:
        """Waits for the others, has the point's action run once; returns this one's result."""

    def enter_first_stream(self) -> None:
        """Has what a merge draws be drawn from the first replica's stream, as one device would."""

    def shares(self) -> dict[int, float]:
        """Returns what each replica's gradient counts for."""

    def weights(self) -> dict[int, float]:
        """Returns the weights of those that take part."""

    def all_weights(self) -> Sequence[float] | None:
        """Returns the weights of all replicas, 0 for those that sit out; ``None`` without any."""


class Replica:
    """One replica while its function runs: what ``current.replica`` is.

    Attributes:
        run: the run that it takes part in.
        device: where its variables are.
        weight: its share in the gradient mean and in ``strategy.reduce("mean", ...)``.
        lent: the optimizers that its step has.
        has_begun: whether its function has been called.
        context: what the user sees of it, once somebody has asked.
        tracing: who follows it, to compile what it does.
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
        """Gives back the optimizers of a step that raised."""
        while self.lent:
            self.lent[-1].swap_out()
            self.lent.pop()
