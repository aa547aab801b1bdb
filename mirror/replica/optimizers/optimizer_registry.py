"""OptimizerRegistry: the optimizers over one strategy's parameters, and the values they exchange.

``CentralOptimizers`` replaces it with a parameter device, see ``params/central_param.py``.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Protocol, cast

import torch
from torch import Tensor

from mirror.execution.lifecycle import LifecycleHooks, WhilePending
from mirror.execution.replicas import Replicas, Run, SwappedOptimizer, WeakReplicaMap
from mirror.execution.runner import Runner
from mirror.replica.gradients.grad_access import GradAccess
from mirror.replica.optimizers.param_groups import ParamGroupsView
from mirror.replica.params.central_param import CentralAccess, CentralParam
from mirror.replica.params.replicated_param import ReplicatedParam
from mirror.replica.params.replicated_params import mark_synced
from mirror.replica.replica_checks import ComparePair, VisitValue

_known: WeakReplicaMap[OptimizerRegistry] = WeakReplicaMap()
optimizers_of = _known.get


class OptimizerOfReplicas(Protocol):
    """One optimizer over mirrored parameters, as the registry calls it."""

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer, while it lives."""

    def bytes_of_replicas(self) -> list[int]:
        """Returns the bytes of state that each replica holds."""

    def sync_idle(self, source: int, others: Sequence[int]) -> None:
        """Copies one replica's state to others."""

    def follow_first(self) -> None:
        """Swaps out, and makes the first replica's state that of all."""

    def check(self, look: ComparePair) -> None:
        """Calls ``look`` with the state of every replica and that of the first one."""

    def show_first(self, see: VisitValue) -> None:
        """Calls ``see`` with the first replica's state."""


class OptimizerRegistry:
    """The optimizers over the mirrored parameters of one strategy.

    Attributes:
        gradients: the gradients of the mirrored parameters.
        lent: the optimizers that a step in progress, or one that has raised, uses.
    """

    def __init__(self, replicas: Replicas, runner: Runner, gradients: GradAccess) -> None:
        self.replicas = replicas
        self.runner = runner
        self.lent: set[SwappedOptimizer] = set()
        self.gradients = gradients
        # In the order of their creation.
        self._all: weakref.WeakKeyDictionary[OptimizerOfReplicas, None] = (
            weakref.WeakKeyDictionary()
        )
        _known.put(replicas, self)

    def part(self) -> LifecycleHooks:
        """Returns the hooks that keep optimizers equal between runs."""
        return LifecycleHooks(
            name="optimizers",
            prepare=WhilePending(self.lent, self._prepare),
            finish=_check_options,
            sync_idle=self._bring_along,
            recover=self._recover,
        )

    def add(self, optimizer: OptimizerOfReplicas) -> None:
        """Registers an optimizer, for as long as it lives."""
        self._all[optimizer] = None

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Returns all optimizers."""
        found = [mirrored.optimizer for mirrored in tuple(self._all)]
        return [optimizer for optimizer in found if optimizer is not None]

    def bytes_of_replicas(self) -> tuple[int, ...]:
        """Returns the bytes of state that each replica holds, of all optimizers."""
        held = [optimizer.bytes_of_replicas() for optimizer in self._in_use()]
        return tuple(map(sum, zip(*held, strict=True)))

    def check(self, look: ComparePair) -> None:
        """Calls ``look`` with the state of every replica and that of the first one."""
        for optimizer in self._in_use():
            optimizer.check(look)

    def show_first(self, see: VisitValue) -> None:
        """Calls ``see`` with the first replica's state of all optimizers."""
        for optimizer in self._in_use():
            optimizer.show_first(see)

    def _in_use(self) -> list[OptimizerOfReplicas]:
        """Returns the records of optimizers that live; without the GIL, some outlive theirs."""
        return [mirrored for mirrored in tuple(self._all) if mirrored.optimizer is not None]

    # Gradients and values

    def reduce(self, run: Run | None = None) -> None:
        """Reduces the gradients for a step, in a run or in the cross-replica context."""
        if run is None:
            self.gradients.unreduced.flush()
        else:
            gradients = self.gradients.unreduced
            gradients.reduce_pending(gradients.shares_in(run))
            self.gradients.refuse_unequal(run)
        self.replicas.workers.num_steps += 1

    @torch.no_grad()
    def broadcast(
        self, variables: Iterable[ReplicatedParam], source: int, others: Sequence[int]
    ) -> None:
        """Copies one replica's values and gradients to others."""
        for variable in variables:
            variable.broadcast(source, others)
            self.gradients.broadcast(variable, source, others)

    # One step for all: see ``mirrored_optimizer.py``

    def gather(self, parameters: ParamGroupsView, leader: int) -> None:
        """Copies the gradients that a step for all needs to an idle first replica."""
        if leader:
            # Its gradients are those of an earlier step: an idle replica does not clear them.
            self.broadcast(parameters.variables, leader, (0,))

    @torch.no_grad()
    def spread(self, parameters: ParamGroupsView) -> None:
        """Copies the values after the first replica's step to the others, on the same device."""
        moved, targets = parameters.variables, parameters.targets
        if [target for target in targets[0] if target.grad is None]:
            moved = [v for v in moved if v.targets[0].grad is not None or v.changed()]
            targets = list(zip(*[variable.targets for variable in moved], strict=True))
        for others in targets[1:]:
            torch._foreach_copy_(others, targets[0])
        mark_synced(moved)

    # Hooks

    def _prepare(self) -> None:
        if self.runner.running is None:
            self.runner.recover()  # a step in the cross-replica context has raised

    def _bring_along(self, source: int, idle: Sequence[int]) -> None:
        for optimizer in tuple(self._all):
            optimizer.sync_idle(source, idle)

    def _recover(self) -> None:
        for loan in tuple(self.lent):  # the optimizer may have been freed since its step raised
            loan.force_out()
        for optimizer in list(self._all):
            optimizer.follow_first()


def _check_options(run: Run) -> None:
    while run.stepped:
        optimizer, left = run.stepped.popitem()
        optimizer.check_left(left)


class CentralOptimizers(OptimizerRegistry):
    """The optimizers over parameters with a parameter device; they step once, there."""

    def __init__(self, replicas: Replicas, runner: Runner, gradients: CentralAccess) -> None:
        super().__init__(replicas, runner, gradients)
        self._access = gradients

    @torch.no_grad()
    def gather(self, parameters: ParamGroupsView, leader: int) -> None:
        """Copies gradients, and values that replicas have changed, to the parameter device."""
        for variable in cast("list[CentralParam]", parameters.variables):
            if variable.has_changed_in_run(leader):
                variable.take(leader)
            self._access.fetch(variable, leader)

    @torch.no_grad()
    def spread(self, parameters: ParamGroupsView) -> None:
        """Copies the values after a step from the parameter device to all replicas."""
        moved = [
            variable
            for variable in cast("list[CentralParam]", parameters.variables)
            if variable.home.grad is not None or variable.changed()
        ]
        homes: list[Tensor] = [variable.home for variable in moved]
        for r in range(self.replicas.num_replicas) if homes else ():
            torch._foreach_copy_([variable.targets[r] for variable in moved], homes)
        for variable in moved:
            variable.mark_equal()
        self._access.drop_unseen(parameters.variables)
