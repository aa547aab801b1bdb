"""ParamSync: keeps parameters, gradients and state equal between compiled steps and other code.

To the rest of the strategy a compiled step looks like a write to the first copies in the
cross-replica context: of parameters, optimizer state, and gradients. Replicas that share a device
read one copy. The other copies are stale until uncompiled code needs them. Buffers are every
replica's own, as in a run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from mirror.compiler.step_inputs import StateTensor
from mirror.execution.lifecycle import AllLifecycleHooks, step_ends
from mirror.execution.replicas import Replicas
from mirror.execution.run import current
from mirror.execution.runner import Runner
from mirror.execution.swapped_state import call_with_worker_rng
from mirror.replica.gradients.grad_access import GradAccess
from mirror.replica.optimizers.optimizer_registry import optimizers_of
from mirror.replica.params.mirrored_buffer import record_writes
from mirror.replica.params.replicated_params import ReplicatedParams, mark_synced

if TYPE_CHECKING:  # importing mirror does not import the compiler of torch
    from mirror.compiler.capture.tracer import CollectivePoint

T = TypeVar("T")


@dataclass(eq=False, slots=True)
class StateChanges:
    """The changes of a step that the rest of the strategy sees.

    Attributes:
        variables, buffers: the records of parameters and buffers.
        optimizers: the optimizers that it steps.
        left, cleared: the parameters that have a gradient after it, and those that have none.
        owners, records: of ``left``, and then of ``cleared``.
    """

    variables: list[Any]
    buffers: list[Any]
    optimizers: list[Optimizer]
    left: list[StateTensor]
    cleared: list[StateTensor]
    owners: list[Any] = field(init=False)
    records: list[Any] = field(init=False)

    def __post_init__(self) -> None:
        places = [*self.left, *self.cleared]
        self.owners = [place.owner for place in places]
        self.records = [place.record for place in places]


class GradientKeeper(Protocol):
    """Copies the gradients that a later step would overwrite; implemented by the launchers."""

    def keep(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Returns the tensors, or copies that no step overwrites."""

    def keep_gradients(
        self, tensors: Sequence[Tensor], parameters: Sequence[Tensor]
    ) -> list[Tensor]:
        """Does the same with gradients that become the parameters' ``.grad`` at once."""


class ParamSync:
    """Synchronizes the state of compiled steps and of the rest of the strategy.

    Args:
        parts: the hooks to call before a compiled step: all except values and gradients.

    Attributes:
        timeline: the times of the replicas' steps.
        moves: changes whenever tensors that only runs use may have got other memory: after a run,
            an uncompiled step, or ``p.data = ...``.
    """

    def __init__(
        self,
        replicas: Replicas,
        runner: Runner,
        variables: ReplicatedParams,
        access: GradAccess,
        parts: AllLifecycleHooks,
    ) -> None:
        self._replicas, self._runner = replicas, runner
        self._variables, self._access, self._parts = variables, access, parts
        self.timeline, self.num_replicas = replicas.timeline, replicas.num_replicas
        devices = list(replicas.devices)
        self._leader_of = [devices.index(device) for device in devices]
        self._leaders = set(self._leader_of)
        self._updates_apart = replicas.shards_state or replicas.has_parameter_device
        self.moves = (0, 0)
        self._others = [r for r in range(self.num_replicas) if r not in self._leaders]

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Returns the mirrored optimizers."""
        return optimizers_of(self._replicas).optimizers()

    def call_exclusively(self, call: Callable[[], T]) -> T:
        """Calls ``call`` while no run is active, and none can begin."""
        workers = self._replicas.workers
        if workers.is_multi_process:
            drawing = partial(call_with_worker_rng, workers, self._runner.generators, call)
            call = partial(workers.call_outermost, drawing)
        return self._runner.call_exclusively(call, "a compiled step")

    def begin(self) -> None:
        """Records that replicas may differ: if the step fails, the next use repairs them."""
        self._runner.unfinished = True

    def cancel(self) -> None:
        """Records that a step has ended before it changed anything."""
        self._runner.unfinished = False

    @property
    def has_other_workers(self) -> bool:
        """Whether other processes take part."""
        return self._replicas.workers.is_multi_process

    def end(self, weight: float) -> None:
        """Records that a step has succeeded, with this weight of the worker's replicas."""
        workers = self._replicas.workers
        if workers.is_multi_process:  # to them it is an outermost run
            workers.run_weights.clear()
            workers.record_run(weight)
            self._runner.on_outermost_end()
        self._runner.unfinished = False

    def wants_eager(self) -> bool:
        """Whether the context of a call makes it run uncompiled."""
        return torch.is_inference_mode_enabled() or self._access.unreduced.deferred.is_open

    def prepare(self) -> None:
        """Brings the changes of the cross-replica context to the first copies."""
        if self._runner.unfinished and self._runner.running is None:
            self._runner.recover()
        self._parts.prepare()
        self._reduce_deferred()
        if len(self._leaders) > 1 or self._updates_apart:
            self._variables.sync_changed()
        self.moves = self._runner.num_prepared, self._variables.memory.num_moves

    def _reduce_deferred(self) -> None:
        """Reduces deferred gradients: a step must find them in ``p.grad``."""
        unreduced = self._access.unreduced
        if unreduced.deferred.has_passes or unreduced.tracker.have_arrived():
            self._access.distribute_common()
            unreduced.flush()
        if unreduced.lent:
            unreduced.own_grads()
        if unreduced.scattered:
            unreduced.gather()

    def update(
        self, point: CollectivePoint, tensors: Sequence[Sequence[Tensor]]
    ) -> list[list[Tensor]]:
        """Makes an optimizer's step between two programs; returns the parameters of each replica.

        Args:
            tensors: by replica, the tensors of the point, on its device.
        """
        assert point.update is not None
        optimizer, have_grads, may_skip = point.update
        records = [place.record for place in point.places]
        params = [list(targets) for targets in zip(*[v.targets for v in records], strict=True)]
        if may_skip and bool(tensors[0][-1]):
            return params
        self._access.distribute_common()
        kept = [[target.grad for target in targets] for targets in params]
        for r, (targets, given) in enumerate(zip(params, tensors, strict=True)):
            grads = iter(given[len(targets) :])
            for target, has_grad in zip(targets, have_grads, strict=True):
                target.grad = next(grads) if has_grad else None
            first = params[self._leader_of[r]]
            for variable, before, value in zip(records, first, given, strict=False):
                if value is not before:  # the step has changed it before
                    variable.copies[r].copy_(value)
        before, current.stepping = current.stepping, (self,)  # no step of its own
        self._runner.unfinished = False
        try:
            optimizer.step()
        finally:
            current.stepping = before
            self._runner.unfinished = True
        for targets, held in zip(params, kept, strict=True):
            for target, grad in zip(targets, held, strict=True):
                target.grad = grad
        return params

    def end_step(self) -> None:
        """Notifies the listeners of ends of steps."""
        step_ends.notify(self.timeline)

    def gradients(self, places: Sequence[StateTensor]) -> dict[StateTensor, Tensor]:
        """Returns the gradients of parameters that have one."""
        self._access.distribute_common()
        found = {}
        for place in places:
            if place.is_parameter:
                holder = place.owner if place.record is None else place.record.targets[0]
                if holder.grad is not None:
                    found[place] = holder.grad
        return found

    def take_gradients(self) -> None:
        """Gives the replicas the gradients of the last compiled step."""
        self._access.distribute_common()

    def record_step(
        self,
        changes: StateChanges,
        grads: Sequence[Tensor],
        keeper: GradientKeeper,
        active: tuple[int, ...],
        weights: Sequence[float] | None,
    ) -> None:
        """Records the changes of a compiled step, and the gradients that it leaves.

        Args:
            grads: the gradients of ``changes.left``, which the next step may overwrite.
            keeper: copies gradients so that no step overwrites them.
        """
        if changes.optimizers:
            self._replicas.workers.num_steps += 1
        for buffer in changes.buffers:
            if buffer.averages_examples:
                buffer.count_examples(active, weights)
        record_writes(changes.buffers, active)
        if not self._replicas.mirrors:
            kept = keeper.keep_gradients(grads, changes.owners[: len(grads)])
            for owner, grad in zip_longest(changes.owners, kept):
                owner.grad = grad
            return
        mark_synced(changes.variables)
        if self._others or self._updates_apart:
            self._variables.mark_stale(changes.variables, self._others)
            for optimizer in changes.optimizers:
                mirror: Any = vars(optimizer).get("_mirror")
                if mirror is not None:
                    mirror.states.follow_first()
        self._access.set_common(changes.records, grads, keeper.keep)
