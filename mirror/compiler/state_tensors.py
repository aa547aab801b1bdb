"""Places: where a strategy keeps its parameters and buffers, on one replica or on several."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from mirror.replica.params.mirrored_tensor import path_of
from mirror.replica.params.replicated_params import MirroredTensors


class StateTensor:
    """A parameter or a buffer of a strategy.

    Attributes:
        owner: the tensor that the program has.
        record: the Variable or Buffer behind it; ``None`` where there is one replica.
    """

    __slots__ = ("is_parameter", "owner", "record")

    def __init__(self, owner: Tensor) -> None:
        self.owner = owner
        self.record: Any = getattr(owner, "_mirrored", None)
        self.is_parameter = isinstance(owner, nn.Parameter)

    @property
    def name(self) -> str:
        """Its path in the model it is of."""
        return path_of(self.owner, "?" if self.record is None else self.record.name)

    def on_replica(self, replica_id: int) -> Tensor:
        """Returns the tensor that one replica has."""
        if self.record is None:
            return self.owner
        own: Tensor = (self.record.targets if self.is_parameter else self.record.copies)[
            replica_id
        ]
        return own

    def ids(self) -> set[int]:
        """Returns the ``id`` of every object that stands for it in a program."""
        if self.record is None:
            return {id(self.owner)}
        objects = [self.owner, *self.record.copies]
        if self.is_parameter:
            objects += self.record.targets
        return set(map(id, objects))


def state_tensors(registry: MirroredTensors) -> list[StateTensor]:
    """Returns the places of all that a strategy holds."""
    return [StateTensor(tensor) for tensor in registry.tensors()]
