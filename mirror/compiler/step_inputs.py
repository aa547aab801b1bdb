"""Inputs: what a compiled step reads and writes, each a tensor that its programs are called with.

Most are the same for all replicas of a device: parameters, optimizer state, learning rates. The
rest each replica has for itself: its part of the batch, its buffers, its weight and its seed.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from torch import Tensor


class InputKind(Enum):
    """What an input is."""

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
    PLACE = "which replica it is"
    SEED = "seed"

    @property
    def is_own(self) -> bool:
        """Whether each replica has one of its own."""
        return self in _OWN


_NEW = {InputKind.GRADIENT, InputKind.SHARED, InputKind.PART}
_OWN = {
    InputKind.BUFFER,
    InputKind.OWN_NUMBER,
    InputKind.PART,
    InputKind.WEIGHT,
    InputKind.PLACE,
    InputKind.SEED,
}


@dataclass(eq=False, slots=True)
class StepInput:
    """One input of a compiled step.

    Attributes:
        of: the Place of a parameter, a buffer, or a gradient; of state and rates the optimizer's
            number; of a part or shared argument its number among the leaves; of a number its
            expression.
        key: of state the parameter's place and the name; of rates the group's number and name.
        fake: what stands for it in the trace.
        value: of what was found in the step, the tensor itself.
    """

    kind: InputKind
    fake: Tensor
    of: Any = None
    key: Any = None
    value: Tensor | None = None

    @property
    def stays(self) -> bool:
        """Whether it is the same tensor in every call, where nobody has replaced it."""
        return self.value is not None or self.kind not in _NEW
