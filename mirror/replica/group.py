"""The replica group: the devices, variables and threads that one strategy drives."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

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
from mirror.replica.copies.assigned import refuse_unlike_flags, refuse_unlike_values
from mirror.replica.copies.buffers import Buffer
from mirror.replica.copies.recorded import Recorded, is_unmade
from mirror.replica.copies.variables import Variable
from mirror.replica.gradients.gradients import Gradients
from mirror.replica.gradients.passes import watch_passes
from mirror.replica.gradients.plain import PlainVariables, note_use, tell_of_plain
from mirror.replica.modules.attributes import OwnValues
from mirror.replica.modules.module import ReplicaDict, mirror_module, route_call
from mirror.replica.optimizer.hooks import watch_optimizer_steps
from mirror.replica.optimizer.optimizer import OptimizerMirror

_groups: weakref.WeakSet[ReplicaGroup] = weakref.WeakSet()


def all_groups() -> tuple[ReplicaGroup, ...]:
    """Returns the groups of all strategies alive."""
    return tuple(_groups)


class ReplicaGroup:
    """N replicas: index r lives on ``devices[r]``; an index is never inferred from a device.

    Attributes:
        variables, buffers: the records of what is mirrored, by ``id``; entries go with the tensor.
        handed_out_grads: gradients that the cross-replica context has seen, so may have changed.
    """

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
        self.variables: dict[int, Variable] = {}
        self.buffers: dict[int, Buffer] = {}
        self.handed_out_grads: dict[Variable, Tensor] = {}
        self.gradients = Gradients(self)
        self.optimizers: weakref.WeakSet[OptimizerMirror] = weakref.WeakSet()
        self.lazy_lock = threading.Lock()
        self.last_active: tuple[int, ...] = tuple(range(self.num_replicas))
        # A single simulated device needs neither moving of arguments nor splitting.
        self.routes_calls = self.num_replicas > 1 or not is_simulated(self.devices)
        self.bytes_per_pack = bytes_per_pack
        self._wire_dtype = wire_dtype
        self.recorded = Recorded()
        self.lent: set[OptimizerMirror] = set()  # to a step
        self.plain = PlainVariables()
        self.attributes: dict[Run, list[OwnValues]] = {}
        self.swaps: list[ReplicaDict] = []  # where a parameter was replaced inside run
        self._owned: dict[int, weakref.ref[Tensor]] = {}
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

        def finish_gradients() -> None:
            self.gradients.finish(self.gradients.equal_shares)
            self._carry_handed_out()

        def take_assigned(run: Run) -> None:
            if run.assigned:
                assigned, run.assigned = run.assigned, {}
                refuse_unlike_flags(assigned, run)
                refuse_unlike_values(assigned, run)

        return (
            Part(
                name="modules",
                prepare=self.mirror_recorded,
                returned=self._refuse_swaps,
                recover=self._drop_swaps,
            ),
            Part(name="attributes", finish=self._join, recover=self.attributes.clear),
            Part(
                name="assigned",
                merging=lambda run: refuse_unlike_flags(run.assigned, run),
                finish=take_assigned,
            ),
            Part(
                name="plain",
                prepare=lambda: note_use(self),
                finish=lambda run: tell_of_plain(self, run),
            ),
            Part(
                name="optimizers",
                finish=_check_options,
                prepare=self._recover_optimizers,
                bring_along=self._bring_along_optimizers,
                recover=self._give_back_optimizers,
            ),
            Part(
                name="gradients",
                prepare=finish_gradients,
                finish=lambda run: self.gradients.finish(run.shares),
                recover=self.gradients.discard,
            ),
            Part(name="collectives", finish=lambda run: order.lift_this_thread()),
            Part(
                name="variables",
                prepare=self._carry_variables,
                bring_along=self._bring_along_variables,
                settle=self.settle,
                recover=self._carry_all,
            ),
            Part(
                name="buffers",
                prepare=self._prepare_buffers,
                ran=self.note_run,
                bring_along=self._bring_along_buffers,
            ),
        )

    # What is mirrored

    def own(self, tensor: Tensor, record: Variable | Buffer) -> None:
        """Registers a mirrored tensor for as long as it lives."""
        self._own_plain(tensor)
        if isinstance(record, Variable):
            self.variables[id(tensor)] = record
        else:
            self.buffers[id(tensor)] = record

    def owns(self, tensor: Tensor) -> bool:
        """Whether the tensor is mirrored by this group."""
        owned = self._owned.get(id(tensor))
        return owned is not None and owned() is tensor

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
                self._own_plain(tensor)

    def _own_plain(self, tensor: Tensor) -> None:
        key, group, self.plain.has_mirrored = id(tensor), weakref.ref(self), True

        def disown(reference: object) -> None:
            alive = group()
            if alive is not None and alive._owned.get(key) is reference:
                del alive._owned[key]
                alive.buffers.pop(key, None)
                variable = alive.variables.pop(key, None)
                if variable is not None:
                    alive.handed_out_grads.pop(variable, None)
                    alive.gradients.forget(variable)

        self._owned[key] = weakref.ref(tensor, disown)

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

    def _recover_optimizers(self) -> None:
        if self.lent and self.running is None:
            self.recover()  # a step in the cross-replica context has raised

    def _give_back_optimizers(self) -> None:
        for optimizer in list(self.optimizers):
            optimizer.give_back()
            optimizer.states.follow_first()

    def _bring_along_optimizers(self, source: int, idle: Iterable[int]) -> None:
        for optimizer in self.optimizers:
            optimizer.states.take_over(source, idle)

    def _carry_handed_out(self) -> None:
        for variable, grad in list(self.handed_out_grads.items()):
            if variable.targets[0].grad is grad:
                variable.carry_grad()
            else:
                del self.handed_out_grads[variable]

    def _carry_variables(self) -> None:
        for variable in self.variables.values():
            if variable.changed():
                variable.carry()

    def _carry_all(self) -> None:
        for variable in self.variables.values():
            variable.follow_first()

    def _bring_along_variables(self, source: int, idle: Iterable[int]) -> None:
        for variable in self.variables.values():
            variable.bring_along(source, idle)

    def settle(self) -> None:
        """Takes the variables as equal on all replicas, as after a step on each."""
        for variable in self.variables.values():
            variable.version = variable.copies[0]._version

    def _prepare_buffers(self) -> None:
        for buffer in self.buffers.values():
            buffer.prepare()

    def note_run(self, active: tuple[int, ...]) -> None:
        """Notes that replicas have run, so that their buffers may have changed."""
        self.last_active = active
        for buffer in self.buffers.values():
            buffer.note_run()

    def _bring_along_buffers(self, source: int, idle: Sequence[int]) -> None:
        for buffer in self.buffers.values():
            buffer.bring_along(list(idle))

    def all_reduce_lists(self, lists: Sequence[Sequence[Tensor]], scale: float) -> None:
        """Sums lists of tensors over the replicas, in place, through the communicator."""
        self.communicator.all_reduce_checked(
            lists, "sum", scale, self.bytes_per_pack, self._wire_dtype
        )

    def parameters(self) -> list[nn.Parameter]:
        """Returns the parameters it owns, mirrored or the only replica's."""
        tensors = (reference() for reference in self._owned.values())
        return [tensor for tensor in tensors if isinstance(tensor, nn.Parameter)]

    def close(self) -> None:
        """Ends threads and the communicator; idempotent."""
        self.runner.close()
        self.gradients.buckets.close()
        self.communicator.close()
        if self._simulates:
            give_back_freed_memory()


def _check_options(run: Run) -> None:
    while run.stepped:
        optimizer, left = run.stepped.popitem()
        optimizer.check_left(left)
