"""The replica group: the devices, variables and threads that one strategy drives."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

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
from mirror.replica.copies.recorded import Recorded, is_unmade
from mirror.replica.copies.registry import Registry
from mirror.replica.copies.variables import Variables
from mirror.replica.gradients.access import Access
from mirror.replica.gradients.gradients import Gradients
from mirror.replica.gradients.passes import watch_passes
from mirror.replica.gradients.plain import PlainVariables
from mirror.replica.modules.attributes import OwnValues
from mirror.replica.modules.module import ReplicaDict, mirror_module, route_call
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
        self.run, self.prepare, self.recover = (
            self.runner.run,
            self.runner.prepare,
            self.runner.recover,
        )
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
        self.lazy_lock = threading.Lock()
        # A single simulated device needs neither moving of arguments nor splitting.
        self.routes_calls = self.num_replicas > 1 or not is_simulated(self.devices)
        self.attributes: dict[Run, list[OwnValues]] = {}
        self.swaps: list[ReplicaDict] = []  # where a parameter was replaced inside run
        _groups.add(self)
        watch_passes()
        watch_optimizer_steps(are_mirrored=self.num_replicas > 1)
        if schedule == "concurrent":
            watch_saved_draws()
        self._simulates = self.num_replicas > 1 and is_simulated(self.devices)
        if self._simulates:
            keep_freed_memory()
        self.runner.keep(self._parts())

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
            return (Part(name="modules", prepare=self.mirror_recorded),)

        return (
            Part(
                name="modules",
                prepare=self.mirror_recorded,
                returned=self._refuse_swaps,
                recover=self._drop_swaps,
            ),
            Part(name="attributes", finish=self._join, recover=self.attributes.clear),
            assigned_part(),
            self.plain.part(),
            self.optimizers.part(),
            self.access.part(self.variables),
            Part(name="collectives", finish=lambda run: order.lift_this_thread()),
            self.variables.part(),
            self.buffers.part(),
        )

    # What is mirrored

    def record(self, module: nn.Module) -> None:
        """Notes a module to be mirrored at the next use."""
        if self.recorded.add(module):
            route_call(module, self)

    def mirror_recorded(self) -> None:
        """Mirrors the modules created in the scope, or changed, since the last use."""
        if self.recorded.modules or self.recorded.unmade:
            for module in self.recorded.take():
                self.mirror(module)

    def mirror(self, module: nn.Module) -> None:
        """Mirrors a module in place; with one replica only moves it to the device."""
        self.timeline.use()  # one replica may never have a run
        if self.num_replicas > 1:
            # What is made here outlives the caller's inference mode.
            with torch.inference_mode(False):
                mirror_module(module, self)
            return
        for submodule in module.modules():
            route_call(submodule, self)
            self.recorded.look_again(submodule)
        for tensor in (*module.parameters(), *module.buffers()):
            if not (self.owns(tensor) or is_unmade(tensor)):
                if tensor.device != self.devices[0]:
                    tensor.data = tensor.data.to(self.devices[0])
                self.registry.own(tensor)

    # Coherence

    def _refuse_swaps(self) -> None:
        while self.swaps:
            self.swaps.pop().refuse_swaps()

    def _drop_swaps(self) -> None:
        while self.swaps:
            self.swaps.pop().swapped.clear()

    def _join(self, run: Run) -> None:
        own = self.attributes.pop(run, None)
        while own:
            own.pop().join(run)

    def close(self) -> None:
        """Ends threads and the communicator; idempotent."""
        self.runner.close()
        self.gradients.buckets.close()
        self.communicator.close()
        if self._simulates:
            give_back_freed_memory()
