"""What an optimizer holds and takes: parameter groups, one replica's, a closure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mirror.errors import StrategyError
from mirror.replica.copies.parameters import MirroredParameter, ReplicaParameter
from mirror.values import are_identical

if TYPE_CHECKING:
    from mirror.replica.copies.variables import Variable
    from mirror.replica.group import ReplicaGroup


class Parameters:
    """What an optimizer's groups held when last looked at: one step is like the other.

    Attributes:
        variables: of all groups' mirrored parameters, in order.
        targets: per replica, its own ordinary parameters of these.
        are_mirrored: whether there are no other parameters.
    """

    __slots__ = ("_lists", "are_mirrored", "targets", "variables")

    def __init__(self, groups: Sequence[dict[str, Any]]) -> None:
        self._lists = [tuple(options["params"]) for options in groups]
        held = [parameter for parameters in self._lists for parameter in parameters]
        mirrored = [p for p in held if isinstance(p, MirroredParameter)]
        self.variables: list[Variable] = [parameter._mirrored for parameter in mirrored]
        self.targets = list(zip(*[variable.targets for variable in self.variables], strict=True))
        self.are_mirrored = len(mirrored) == len(held)

    def are_in(self, groups: Sequence[dict[str, Any]]) -> bool:
        """Whether the groups hold the same mirrored parameters, and no others, in 20 ns each."""
        return (
            self.are_mirrored
            and len(groups) == len(self._lists)
            and all(
                are_identical(options["params"], known)
                for options, known in zip(groups, self._lists, strict=True)
            )
        )

    @torch.no_grad()
    def bring_first_along(self, active: tuple[int, ...]) -> None:
        """Gives the first replica, if it sits the run out, what the others have now.

        Its gradients would be those of an earlier step: nobody has cleared them.
        """
        if 0 not in active:
            for variable in self.variables:
                variable.carry(active[0], (0,))
                variable.replicas.group.access.carry(variable, active[0], (0,))


def mirrored_group(optimizer: Optimizer) -> ReplicaGroup | None:
    """Returns the group whose parameters an optimizer holds; ``None`` if none is mirrored.

    Raises:
        StrategyError: its parameters are of two strategies, or one replica's own.
    """
    group: ReplicaGroup | None = None
    for options in optimizer.param_groups:
        for parameter in options["params"]:
            if isinstance(parameter, MirroredParameter):
                if group is not None and parameter._mirrored.replicas.group is not group:
                    raise StrategyError(
                        "an optimizer holds parameters of two strategies; make one for each"
                    )
                group = parameter._mirrored.replicas.group
            elif isinstance(parameter, ReplicaParameter):
                raise StrategyError(
                    "an optimizer made inside strategy.run holds one replica's "
                    "own parameters; make optimizers outside run"
                )
    return group


def group_of_replica(options: dict[str, Any], replica_id: int) -> dict[str, Any]:
    """Returns one replica's copy of a parameter group: what it writes there is its own."""
    own = {**options, "params": of_replica(options["params"], replica_id)}
    for name, value in options.items():
        if replica_id and isinstance(value, Tensor):
            own[name] = value.clone()
    return own


def of_replica(parameters: Iterable[Tensor], replica_id: int) -> list[Tensor]:
    """Returns one replica's ordinary parameters; what is not mirrored goes with the first."""
    return [
        p._mirrored.targets[replica_id] if isinstance(p, MirroredParameter) else p
        for p in parameters
        if replica_id == 0 or isinstance(p, MirroredParameter)
    ]


def refuse_what_is_not_mirrored(optimizer: Optimizer) -> None:
    """Raises for a parameter whose gradient nobody would reduce."""
    for i, options in enumerate(getattr(optimizer, "param_groups", ())):
        for parameter in options["params"]:
            if not isinstance(parameter, MirroredParameter) and parameter.requires_grad:
                raise StrategyError(
                    f"parameter group {i} has a parameter of shape {tuple(parameter.shape)} "
                    "that no mirrored module holds: its gradient would not be reduced; put it "
                    "into a mirrored module, or step outside strategy.run"
                )


class Once:
    """A closure that was evaluated before the replicas merged."""

    def __init__(self, loss: Any) -> None:
        self._losses = [loss]

    def __call__(self) -> Any:
        if not self._losses:
            raise StrategyError(
                "this optimizer evaluates its closure several times, on losses that differ "
                "between replicas; call step(closure) outside strategy.run, where the closure's "
                "forward spans all replicas"
            )
        return self._losses.pop()
