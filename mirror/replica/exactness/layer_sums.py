"""Forward hooks for trials of a call: sums of the outputs of layers, and rounding errors in them.

The sums over each replica's examples add up to those over the whole batch, if every layer's output
for an example depends on that example alone. So two numbers for each call of a layer show the
first layer for which that does not hold.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

_TOLERANCE = 1e-3  # relative to the squares; a smaller difference is rounding
_MOST_CALLS = 10_000


class LayerSums:
    """The sums of the outputs of all calls of layers, over the examples of one or several calls.

    Examples have different weights, so that another order of the examples is another sum.
    """

    def __init__(self) -> None:
        self._layers: list[nn.Module] = []
        self._sums: list[tuple[float, float] | None] = []

    def adding(self, start: int, size: int) -> Any:
        """Returns a forward hook that adds the outputs of one call of a model.

        Args:
            start: the first of the batch's examples in the call.
            size: the number of examples in the call.
        """
        calls = [0]
        weights = torch.arange(start, start + size, dtype=torch.float64).add_(1).sin_().add_(2)

        def add(layer: nn.Module, args: Any, output: Any) -> None:
            index, calls[0] = calls[0], calls[0] + 1
            if index >= _MOST_CALLS:
                return
            sums = _sums_of(output, weights)
            if index == len(self._sums):
                self._layers.append(layer)
                self._sums.append(sums)
                return
            before = self._sums[index]
            if before is None or sums is None or self._layers[index] is not layer:
                self._sums[index] = None
            else:
                self._sums[index] = before[0] + sums[0], before[1] + sums[1]

        return add

    def first_other_than(self, other: LayerSums) -> nn.Module | None:
        """Returns the layer of the first call with other sums; ``None`` if none is known."""
        calls = zip(self._layers, self._sums, other._layers, other._sums, strict=False)
        for layer, sums, other_layer, other_sums in calls:
            if layer is not other_layer:
                return None
            if sums is not None and other_sums is not None:
                squares = max(sums[1], other_sums[1])
                limit = _TOLERANCE * (math.sqrt(squares) + squares)
                if any(abs(a - b) > limit for a, b in zip(sums, other_sums, strict=True)):
                    return layer
        return None


def _sums_of(output: Any, weights: Tensor) -> tuple[float, float] | None:
    """Returns the weighted sum, and that of the squares, of the first tensor of examples."""
    while type(output) in (tuple, list) and output:
        output = output[0]
    if not isinstance(output, Tensor) or output.shape[:1] != weights.shape:
        return None
    if not output.is_floating_point() or output.layout is not torch.strided:
        return None
    rows = output.detach().reshape(len(weights), -1).double()
    weights = weights.to(rows.device)
    return float(weights @ rows.sum(1)), float(weights @ rows.square().sum(1))


class RoundingErrors:
    """A forward hook that multiplies outputs of layers by 1 + eps or 1 - eps of their dtype.

    Inputs are changed as well: the first layer may subtract a mean that is large. Those of whole
    numbers are not: these are masks, lengths and the like, which have no rounding errors.
    """

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(127)

    def __call__(self, layer: nn.Module, args: Any, output: Any) -> Any:
        return None if layer._modules else self._change(output)

    def add_to_inputs(self, value: Any) -> Any:
        """Returns a structure with other tensors; they keep their attributes and graphs."""
        if type(value) is Tensor and value.is_floating_point() and value.numel():
            detached = value.detach()
            if not torch.equal(detached, detached.round()):
                detached.copy_(self._change(detached))
            return value
        if type(value) is dict:
            return {key: self.add_to_inputs(child) for key, child in value.items()}
        if type(value) in (tuple, list):
            return type(value)(map(self.add_to_inputs, value))
        return value

    def _change(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point() and value.numel():
            signs = torch.randint(0, 2, value.shape, generator=self._generator) * 2 - 1
            eps = torch.finfo(value.dtype).eps
            wide = value.float() if value.dtype.itemsize < 4 else value
            return (wide * (1 + eps * signs.to(wide.device, wide.dtype))).to(value.dtype)
        if type(value) in (tuple, list):
            return type(value)(map(self._change, value))
        return value
