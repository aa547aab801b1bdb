"""Placements: where optimizer state is, and how an update there reaches all replicas.

    placement      gradients go to     the update is made        values go to
    each replica   all replicas        by each, on its device    nobody
    first replica  all replicas        once, by the first        the others, on the same device
    central        the first, and to   once, on the parameter    all replicas
                   the parameter       device
                   device
    sharded        the replicas that   by each, of its slices    all replicas of all workers: an
                   step their slices                             ``all_gather``

``ShardedSteps`` makes the sharded update, ``MirroredOptimizer`` the others. Replicas on one device
need not compute the same update N times: the first one's takes a fifth of the time, and keeps one
state instead of N.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from operator import attrgetter, is_
from typing import NamedTuple, cast

import torch
from torch import Tensor

from mirror.replica.gradients.exposed_grads import ExposedGrads, HomeGrads, broadcast_grad
from mirror.replica.optimizers.param_groups import ParamGroupsView
from mirror.replica.params.central_param import CentralParam
from mirror.replica.params.replicated_param import ReplicatedParam
from mirror.replica.params.replicated_params import mark_synced

_grad_of = attrgetter("grad")


class Placement(NamedTuple):
    """What surrounds an update that is made once for all replicas.

    Attributes:
        gather: brings the gradients of parameters, and values that replicas have changed, to where
            the update is made, from this active replica.
        publish: brings the new values to all replicas.
    """

    gather: Callable[[ExposedGrads, ParamGroupsView, int], None]
    publish: Callable[[ExposedGrads, ParamGroupsView], None]


@torch.no_grad()
def broadcast(variables: Iterable[ReplicatedParam], source: int, others: Sequence[int]) -> None:
    """Copies one replica's values and gradients to others."""
    for variable in variables:
        variable.broadcast(source, others)
        broadcast_grad(variable, source, others)


def _gather_on_first(exposed: ExposedGrads, parameters: ParamGroupsView, leader: int) -> None:
    if leader:
        # Its gradients are those of an earlier step: an idle replica does not clear them.
        broadcast(parameters.variables, leader, (0,))


@torch.no_grad()
def _publish_from_first(exposed: ExposedGrads, parameters: ParamGroupsView) -> None:
    moved, targets = parameters.variables, parameters.targets
    if any(map(is_, map(_grad_of, targets[0]), repeat(None))):
        moved = [v for v in moved if v.targets[0].grad is not None or v.has_changed()]
        targets = list(zip(*[variable.targets for variable in moved], strict=True))
    for others in targets[1:]:
        torch._foreach_copy_(others, targets[0])
    mark_synced(moved)


@torch.no_grad()
def _gather_at_home(exposed: ExposedGrads, parameters: ParamGroupsView, leader: int) -> None:
    for variable in cast("list[CentralParam]", parameters.variables):
        if variable.has_changed_in_run(leader):
            variable.take(leader)
        cast("HomeGrads", exposed).fetch(variable, leader)


@torch.no_grad()
def _publish_from_home(exposed: ExposedGrads, parameters: ParamGroupsView) -> None:
    variables = cast("list[CentralParam]", parameters.variables)
    moved = [v for v in variables if v.home.grad is not None or v.has_changed()]
    homes: list[Tensor] = [variable.home for variable in moved]
    if moved:
        for targets in zip(*[variable.targets for variable in moved], strict=True):
            torch._foreach_copy_(targets, homes)
    for variable in moved:
        variable.mark_equal()
    cast("HomeGrads", exposed).drop_fetched(variables)


FIRST_REPLICA = Placement(_gather_on_first, _publish_from_first)
CENTRAL = Placement(_gather_at_home, _publish_from_home)
