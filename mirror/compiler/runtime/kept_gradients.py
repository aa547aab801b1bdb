"""KeptGradients: the gradients of unmirrored parameters, after steps that run as CUDA graphs.

A replay overwrites the gradients that the replay before has left in graph memory. With one replica
``p.grad`` is read without mirror, at any time after the step. So each step copies the gradients,
in one call, into tensors that it makes once. As on one device, a gradient that the program holds
is never written again: see ``TensorHolders``. While one is held, each step makes new tensors.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mirror.base.tensor_holders import TensorHolders
from mirror.comm.packing import move_into_flats
from mirror.replica.gradients.exposed_grads import copy_without_bucket

_PACK_BYTES = 25 * 2**20  # a gradient that the program holds keeps at most so much memory alive

_shape_of = operator.attrgetter("shape")


class KeptGradients:
    """Tensors for the gradients of one graph.

    Args:
        sources: the gradients in graph memory; every replay writes the same tensors.
        parameters: whose ``.grad`` the copies become.

    Attributes:
        sources: these.
    """

    def __init__(self, sources: Sequence[Tensor], parameters: Sequence[Any]) -> None:
        self.sources, self._parameters = list(sources), parameters
        self._tensors = list(sources)
        (flats,), apart = move_into_flats([self._tensors], _PACK_BYTES)
        for i in apart:
            self._tensors[i] = sources[i].clone()
        memory = [*flats, *map(self._tensors.__getitem__, apart)]
        self._shapes = [*map(_shape_of, self._tensors)]
        for i in range(len(sources)):  # no variable holds a tensor now
            copy_without_bucket(self._tensors[i])
        self._holders = TensorHolders(self._tensors, memory)

    def are_free(self) -> bool:
        """Whether nothing but the parameters holds the copies, and their layout is as it was."""
        shapes = [*map(_shape_of, self._tensors)]  # the program may have transposed one in place
        return shapes == self._shapes and self._holders.are_free(self._parameters)

    def take(self) -> list[Tensor]:
        """Returns copies of the gradients; they overwrite those of the last call."""
        torch._foreach_copy_(self._tensors, self.sources, non_blocking=True)
        return list(self._tensors)
