"""Replicas: the replicas of one strategy in this process. It exists as long as the strategy."""

from __future__ import annotations

import weakref
from typing import Any, Generic, Protocol, TypeVar

import torch

from mirror.base.process_bound import WeakRegistry
from mirror.base.timeline import Timeline
from mirror.comm.communicator import Communicator
from mirror.comm.workers.worker_group import LocalWorkerGroup
from mirror.device.device_mesh import DeviceMesh
from mirror.devices import is_simulated

T = TypeVar("T")


class ClearableCache(Protocol):
    """A cache that may keep an optimizer alive which the program has dropped."""

    def clear(self) -> None:
        """Drops all entries; they are made again where they are needed."""


class Replicas:
    """The replicas of one strategy in this process; replica r is on ``devices[r]``.

    A replica id is never inferred from a device. The identity of this object shows to which
    strategy a variable or a replica belongs. Of replicas in other processes, only the number is
    known: ``workers``.

    Attributes:
        communicator: moves data between the replicas.
        workers: the processes that train together; a single one in most programs.
        mesh: the device mesh; ``devices`` are those at position 0. See [Note: Places].
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
        shards_state: whether each replica holds and updates a part of the optimizers' state. Of
            workers, also one with a single replica: all of them step the same way.
        caches: the caches that may keep optimizers alive.
    """

    __slots__ = (
        *("__weakref__", "are_simulated", "caches", "communicator", "device_types", "devices"),
        *("has_parameter_device", "is_nested", "is_one_device", "mirrors", "names"),
        *("num_replicas", "parameter_device", "mesh", "shards_state", "steps_once", "strategy"),
        *("timeline", "weighted", "workers"),
    )

    def __init__(
        self,
        mesh: DeviceMesh,
        communicator: Communicator,
        *,
        strategy: Any,
        weighted: bool,
        is_nested: bool = False,
        workers: LocalWorkerGroup | None = None,
        home: torch.device | None = None,
        shards_state: bool = False,
    ) -> None:
        self.mesh, self.devices = mesh, mesh.positions[0]
        self.communicator = communicator
        self.num_replicas = len(self.devices)
        self.workers = workers = (
            LocalWorkerGroup(self.num_replicas) if workers is None else workers
        )
        self.has_parameter_device = home is not None
        self.parameter_device = self.devices[0] if home is None else home
        self.mirrors = workers.num_replicas > 1 or self.has_parameter_device
        worker = f"worker {workers.rank}, " if workers.is_multi_process else ""
        labels = [worker + ", ".join(map(str, devices)) for devices in mesh.replicas]
        self.names = tuple(
            f"replica {workers.replica_offset + r} of {workers.num_replicas} ({labels[r]})"
            for r in range(self.num_replicas)
        )
        self.strategy, self.weighted, self.is_nested = strategy, weighted, is_nested
        self.timeline = Timeline(self.names)
        self.caches: WeakRegistry[ClearableCache] = WeakRegistry()
        self.device_types = tuple({"cpu", *(device.type for device in self.devices)})
        self.are_simulated = is_simulated(self.devices)
        self.is_one_device = len(set(self.devices)) == 1
        self.shards_state = shards_state and workers.num_replicas > 1
        shares_device = self.is_one_device and self.num_replicas > 1
        self.steps_once = shares_device or self.has_parameter_device


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

    def find(self, replicas: Replicas) -> T | None:
        """Returns the object of these replicas, if there is one."""
        found = self._known.get(replicas)
        return None if found is None else found()

    def all(self) -> list[T]:
        """Returns all objects that are alive."""
        return list(self._owned)
