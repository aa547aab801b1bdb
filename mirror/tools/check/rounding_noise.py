"""Adds rounding errors to a run on one device, to see how far they alone carry it.

Problem: N replicas add in another order, so all numbers differ in their last digits. What that
amounts to depends on the script: a gradient that is nothing but rounding (of a key bias in
attention) becomes a whole step of Adam; bfloat16 spreads by a percent.
Rule: a second run on one device changes parameters (once), the outputs of layers and the gradients
of these outputs by one unit in the last place of their dtype.
Consequence: its distance from the first run is what rounding does to this script. The signs are
fixed and come from no generator, so draws, data and recomputed forwards stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

_PERIOD = 65_521  # a prime, so that rows get different signs


def _takes_errors(tensor: Tensor) -> bool:
    is_dense = tensor.layout is torch.strided and not tensor.is_nested
    return is_dense and tensor.is_floating_point()


class RoundingNoise:
    """Adds rounding errors.

    Attributes:
        unit: the largest unit in the last place of all dtypes that layers have returned.
    """

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(127)
        self._signs = torch.randint(0, 2, (_PERIOD,), generator=generator).double() * 2 - 1
        self._known: dict[int, Any] = {}
        self._factors: dict[Any, Tensor] = {}
        self.unit = 0.0

    def change_output(self, module: nn.Module, result: Any, *, is_root: bool) -> Any:
        """Returns an output with errors, if the module is the outermost or has none inside."""
        if is_root or not any(True for _ in module.children()):
            return self._change(result)
        return result

    def change_gradients(self, params: Iterable[Any]) -> None:
        """Adds errors to gradients in place, where layers have computed in half precision."""
        if self.unit < 1e-4:
            return
        with torch.no_grad():
            for param in params:
                grad = param.grad
                if grad is not None and _takes_errors(grad):
                    grad.copy_(grad * self._factor(grad, self.unit))

    def _change(self, value: Any) -> Any:
        if type(value) is Tensor:
            if not _takes_errors(value) or not value.numel():
                return value
            unit = torch.finfo(value.dtype).eps / (1 if value.dtype.itemsize > 2 else 2)
            self.unit = max(self.unit, unit)
            factor = self._factor(value, unit)
            if value.dtype.itemsize > 2:
                return value * factor
            return (value.float() * factor).to(value.dtype)
        if type(value) in (tuple, list):
            return type(value)(self._change(child) for child in value)
        return value

    def change_parameters(self, module: nn.Module) -> None:
        """Adds errors to parameters in place, once each."""
        with torch.no_grad():
            for param in module.parameters():
                if id(param) not in self._known and _takes_errors(param):
                    self._known[id(param)] = param
                    if not isinstance(param, nn.parameter.UninitializedParameter):
                        unit = torch.finfo(param.dtype).eps
                        param.copy_(param * self._factor(param, unit))

    def _factor(self, like: Tensor, unit: float) -> Tensor:
        key = like.shape, like.dtype, like.device, unit
        if key not in self._factors:
            num = like.numel()
            signs = self._signs.repeat(num // _PERIOD + 1)[:num]
            dtype = like.dtype if like.dtype.itemsize > 2 else torch.float32
            factor = (1 + signs * unit).to(dtype).view(like.shape).to(like.device)
            if num > 1_000_000:
                return factor
            self._factors[key] = factor
        return self._factors[key]
