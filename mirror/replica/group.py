"""The replica group: the devices, variables and threads that one strategy drives."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

import mirror.replica.copies.overrides  # noqa: F401  registers what tensor functions do
from mirror.accelerator.host_memory import give_back_freed_memory, keep_freed_memory
from mirror.comm.base import Communicator
from mirror.devices import is_simulated
from mirror.execution.current import current
from mirror.execution.part import Part
from mirror.execution.replicas import Replicas
from mirror.execution.run import Run
from mirror.execution.runner import Runner
from mirror.execution.saved_draws import watch_saved_draws
from mirror.replica.collectives.nodes import order
from mirror.replica.collectives.reducer import Reducer
from mirror.replica.copies.assigned import assigned_part
from mirror.replica.copies.buffers import Buffers
from mirror.replica.copies.recorded import Recorded
from mirror.replica.copies.registry import Registry
from mirror.replica.copies.variables import Variables
from mirror.replica.gradients.access import Access
from mirror.replica.gradients.gradients import Gradients
from mirror.replica.gradients.passes import watch_passes
from mirror.replica.gradients.plain import PlainVariables
from mirror.replica.modules.modules import Modules
from mirror.replica.modules.own_values import Attributes
from mirror.replica.optimizer.hooks import watch_optimizer_steps
from mirror.replica.optimizer.optimizers import Optimizers

_groups: weakref.WeakSet[ReplicaGroup] = weakref.WeakSet()


def all_groups() -> tuple[ReplicaGroup, ...]:
    """Returns the groups of all strategies alive."""
    return tuple(_groups)


class ReplicaGroup:
    """N replicas: index r lives on ``devices[r]``; an index is never inferred from a device."""

    def __init__(
        self,
        devices: Sequence[torch.device],
        communicator: Communicator,
        *,
        strategy: object,
        schedule: str,
        weighted: bool,
        bytes_per_pack: int,
        wire_dtype: torch.dtype | None,
        timeout_seconds: float | None,
    ) -> None:
        self.replicas = Replicas(
            devices,
            communicator,
            strategy=strategy,
            weighted=weighted,
            is_nested=current.replica is not None,
        )
        self.replicas.group = self
        self.runner = Runner(self.replicas, schedule=schedule, timeout_seconds=timeout_seconds)
        # Transitional: what other files ask the group for.
        self.devices, self.num_replicas = self.replicas.devices, self.replicas.num_replicas
        self.names, self.timeline = self.replicas.names, self.replicas.timeline
        self.strategy, self.weighted, self.communicator = strategy, weighted, communicator
        self.is_one_device = self.replicas.is_one_device
        self.check_usable, self.check_between_runs = (
            self.runner.check_usable,
            self.runner.check_between_runs,
        )
        self.registry = Registry()
        self.recorded = Recorded()
        reducer = Reducer(self.replicas, bytes_per_pack, wire_dtype)
        self.gradients = Gradients(self.replicas, self.runner, reducer)
        self.access = Access(self.replicas, self.runner, self.gradients)
        self.variables = Variables(self.replicas, self.registry, self.access)
        self.buffers = Buffers(self.replicas, self.registry)
        self.plain = PlainVariables(self.replicas, self.registry, self.recorded)
        self.owns, self.parameters = self.registry.owns, self.registry.parameters
        self.optimizers = Optimizers(self.replicas, self.runner, self.access)
        self.attributes = Attributes(self.runner)
        self.modules = Modules(
            self.replicas,
            self.runner,
            self.registry,
            self.recorded,
            self.variables,
            self.buffers,
            self.attributes,
        )
        _groups.add(self)
        watch_passes()
        watch_optimizer_steps(are_mirrored=self.num_replicas > 1)
        if schedule == "concurrent":
            watch_saved_draws()
        self._simulates = self.num_replicas > 1 and is_simulated(self.devices)
        if self._simulates:
            keep_freed_memory()
        self.runner.keep(self._parts())
        self.run, self.prepare, self.recover = (
            self.runner.run,
            self.runner.prepare,
            self.runner.recover,
        )

    @property
    def running(self) -> Run | None:
        return self.runner.running

    @property
    def parallel_pass(self) -> Any:
        return self.runner.parallel_pass

    @property
    def is_closed(self) -> bool:
        return self.runner.is_closed

    def _parts(self) -> tuple[Part, ...]:
        if self.num_replicas == 1:
            return (self.modules.part(),)

        return (
            self.modules.part(),
            self.attributes.part(),
            assigned_part(),
            self.plain.part(),
            self.optimizers.part(),
            self.gradients.part(),
            Part(name="collectives", finish=lambda run: order.lift_this_thread()),
            self.variables.part(),
            self.access.part(self.variables),
            self.buffers.part(),
        )

    def close(self) -> None:
        """Ends threads and the communicator; idempotent."""
        self.runner.close()
        self.gradients.buckets.close()
        self.communicator.close()
        if self._simulates:
            give_back_freed_memory()
