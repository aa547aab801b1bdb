"""Conversions of a mirrored module: ``to``, ``cuda``, ``half``, ``share_memory`` and others.

Outside ``run`` they convert all copies; inside, each replica converts its own. The copies stay on
their replicas' devices: a conversion that would move them raises StrategyError.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from mirror.base.torch_private import CONVERT, wrap_once
from mirror.errors import StrategyError
from mirror.execution.replicas import Replicas
from mirror.replica.modules.call_interceptor import owner_of
from mirror.replica.params.mirrored_tensor import MirroredTensor

Conversion = Callable[[Tensor], Tensor]


def watch_conversions() -> None:
    """Wraps ``Module._apply``, which all conversions call; once, permanently."""
    wrap_once(nn.Module, CONVERT, _looking)


def _looking(original: Callable[..., Any]) -> Callable[..., Any]:
    def apply_looked_at(self: Any, fn: Conversion, *args: Any, **kwargs: Any) -> Any:
        owner = owner_of(self)
        if owner is None or not owner.mirrors or isinstance(fn, _Staying):
            return original(self, fn, *args, **kwargs)
        return original(self, _Staying(fn, owner), *args, **kwargs)

    return apply_looked_at


@dataclass(frozen=True, slots=True)
class _Staying:
    """A conversion that leaves variables on their replicas' devices."""

    fn: Conversion
    replicas: Replicas

    def __call__(self, tensor: Tensor) -> Tensor:
        converted = self.fn(tensor)
        if self.replicas.places.is_model_parallel:
            self._check_place(tensor, converted)
            return converted
        devices = self.replicas.devices
        if converted.device not in devices and not converted.is_meta:
            names = ", ".join(map(str, devices))
            raise StrategyError(
                f"a mirrored module was to be moved to {converted.device}; its variables live on "
                f"its replicas' devices ({names}), and calls move their arguments there: leave "
                "the move out, or move an ordinary copy, copy.deepcopy(model)"
            )
        return converted

    def _check_place(self, tensor: Tensor, converted: Tensor) -> None:
        """Raises StrategyError for a move of a variable to another device."""
        places, is_mirrored = self.replicas.places, isinstance(tensor, MirroredTensor)
        devices = () if is_mirrored else places.replicas[0]
        stays = converted.device == tensor.device or converted.is_meta
        if not stays and converted.device not in devices:
            raise StrategyError(
                f"layers are placed on the first replica's devices "
                f"({', '.join(map(str, places.replicas[0]))}), before the model is used "
                "for the first "
                f"time; a variable on {tensor.device} was to be moved to {converted.device}: move "
                "it in __init__, or before strategy.mirror(model)"
            )
