"""Inputs of compiled steps: the tensors that programs take, and the parameters behind them.

Most are the same for all replicas of a device: parameters, optimizer state, learning rates. The
rest are per replica: its part of the batch, its buffers, its weight and its seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from torch import Tensor, nn

from mirror.replica.params.mirrored_tensor import path_of
from mirror.replica.params.replicated_params import MirroredTensors


class InputKind(Enum):
    """The kinds of inputs."""

    PARAMETER = "parameter"
    GRADIENT = "gradient"  # left by a step before
    STATE = "optimizer state"
    RATE = "learning rate"
    NUMBER = "number that changes"  # see [Note: Traced numbers]
    COUNT = "number of replicas that take part"
    SHARED = "tensor that all replicas have in common"  # an argument, or found in the step
    OWN_NUMBER = "number of its own that changes"
    BUFFER = "buffer"
    PART = "part of the batch"
    WEIGHT = "weight"
    REPLICA_INDEX = "which replica it is"
    SEED = "seed"

    @property
    def is_own(self) -> bool:
        """Whether each replica has its own."""
        return self in _OWN


_NEW = {InputKind.GRADIENT, InputKind.SHARED, InputKind.PART}
_OWN = {
    InputKind.BUFFER,
    InputKind.OWN_NUMBER,
    InputKind.PART,
    InputKind.WEIGHT,
    InputKind.REPLICA_INDEX,
    InputKind.SEED,
}


@dataclass(eq=False, slots=True)
class StepInput:
    """One input of a compiled step.

    Attributes:
        of: for a parameter, a buffer or a gradient, its StateTensor; for state and rates, the
            number of the optimizer; for an argument, the number of its leaf; for a number, its
            expression.
        key: for state, the parameter and the name; for rates, the number of the group and "lr".
        fake: the placeholder in the trace.
        value: for a tensor that the step has found outside itself, the tensor.
    """

    kind: InputKind
    fake: Tensor
    of: Any = None
    key: Any = None
    value: Tensor | None = None

    @property
    def stays(self) -> bool:
        """Whether it is the same tensor in every call, unless the program replaces it."""
        return self.value is not None or self.kind not in _NEW


class StateTensor:
    """A parameter or a buffer of a strategy.

    Attributes:
        owner: the tensor that the program has.
        record: the ReplicatedParam or MirroredBuffer behind it; ``None`` with one replica.
    """

    __slots__ = ("is_parameter", "owner", "record")

    def __init__(self, owner: Tensor) -> None:
        self.owner = owner
        self.record: Any = getattr(owner, "_mirrored", None)
        self.is_parameter = isinstance(owner, nn.Parameter)

    @property
    def name(self) -> str:
        """Its path in its model."""
        return path_of(self.owner, "?" if self.record is None else self.record.name)

    def tensor_of(self, replica_id: int) -> Tensor:
        """Returns the tensor of one replica."""
        return self.owner if self.record is None else self.tensors()[replica_id]

    def tensors(self) -> Sequence[Tensor]:
        """Returns the tensors of all replicas."""
        if self.record is None:
            return (self.owner,)
        own: Sequence[Tensor] = self.record.targets if self.is_parameter else self.record.copies
        return own

    def ids(self) -> set[int]:
        """Returns the ``id`` of every object that a program may use for it."""
        if self.record is None:
            return {id(self.owner)}
        objects = [self.owner, *self.record.copies]
        if self.is_parameter:
            objects += self.record.targets
        return set(map(id, objects))


def state_tensors(registry: MirroredTensors) -> list[StateTensor]:
    """Returns the parameters and buffers of a strategy."""
    return [StateTensor(tensor) for tensor in registry.tensors()]
