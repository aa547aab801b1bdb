"""What an optimizer's parameter groups hold, and what of it is one replica's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import Tensor
from torch.optim import Optimizer

from mirror.errors import StrategyError
from mirror.replica.parameters import MirroredParameter, ReplicaParameter

if TYPE_CHECKING:
    from mirror.replica.group import ReplicaGroup


def mirrored_group(optimizer: Optimizer) -> ReplicaGroup | None:
    """Returns the group whose parameters an optimizer holds; ``None`` if none is mirrored.

    Raises:
        StrategyError: its parameters are of two strategies, or one replica's own.
    """
    group: ReplicaGroup | None = None
    for options in optimizer.param_groups:
        for parameter in options["params"]:
            if isinstance(parameter, MirroredParameter):
                if group is not None and parameter._mirrored.group is not group:
                    raise StrategyError(
                        "an optimizer holds parameters of two strategies; make one for each"
                    )
                group = parameter._mirrored.group
            elif isinstance(parameter, ReplicaParameter):
                raise StrategyError(
                    "an optimizer made inside strategy.run holds one replica's "
                    "own parameters; make optimizers outside run"
                )
    return group


def has_hooks(optimizer: Optimizer) -> bool:
    """Whether the user's hooks would see one replica's step only."""
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def of_replica(parameters: Iterable[Tensor], replica_id: int) -> list[Tensor]:
    """Returns one replica's ordinary parameters; what is not mirrored goes with the first."""
    return [
        p._mirrored.targets[replica_id] if isinstance(p, MirroredParameter) else p
        for p in parameters
        if replica_id == 0 or isinstance(p, MirroredParameter)
    ]
