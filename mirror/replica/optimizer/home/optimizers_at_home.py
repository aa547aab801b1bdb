"""CentralOptimizers: what steps take from the replicas, and give them. See [Note: Home]."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from mirror.execution.replicas import Replicas
from mirror.execution.runner import Runner
from mirror.replica.copies.home.home_variable import CentralParam
from mirror.replica.gradients.home.access import CentralAccess
from mirror.replica.optimizer.groups import ParamGroupsView
from mirror.replica.optimizer.optimizers import OptimizerRegistry


class CentralOptimizers(OptimizerRegistry):
    """The optimizers over parameters that live at home, where they step once for all replicas."""

    def __init__(self, replicas: Replicas, runner: Runner, gradients: CentralAccess) -> None:
        super().__init__(replicas, runner, gradients)
        self._access = gradients

    @torch.no_grad()
    def gather(self, parameters: ParamGroupsView, leader: int) -> None:
        """Gives home what a step needs: gradients, and values that replicas have changed."""
        for variable in cast("list[CentralParam]", parameters.variables):
            if variable.has_changed_in_run(leader):
                variable.take(leader)
            self._access.fetch(variable, leader)

    @torch.no_grad()
    def spread(self, parameters: ParamGroupsView) -> None:
        """Gives all replicas the values that a step has left at home."""
        moved = [
            variable
            for variable in cast("list[CentralParam]", parameters.variables)
            if variable.home.grad is not None or variable.changed()
        ]
        homes: list[Tensor] = [variable.home for variable in moved]
        for r in range(self.replicas.num_replicas) if homes else ():
            torch._foreach_copy_([variable.targets[r] for variable in moved], homes)
        for variable in moved:
            variable.note_known()
        self._access.drop_unseen(parameters.variables)
