"""Conversions of a mirrored module: ``to``, ``cuda``, ``half``, ``share_memory`` and their kin.

Outside ``run`` they convert all copies, inside each replica its own. The copies stay on their
replicas' devices: what would move them elsewhere is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from mirror.errors import StrategyError
from mirror.replica.routing import group_of

if TYPE_CHECKING:
    from mirror.replica.group import ReplicaGroup

Conversion = Callable[[Tensor], Tensor]


def watch_conversions() -> None:
    """Has ``Module._apply``, which all conversions come to, look at mirrored modules; for good."""
    original: Any = nn.Module._apply  # untyped
    if hasattr(original, "_is_watched"):
        return

    @functools.wraps(original)
    def apply_looked_at(self: Any, fn: Conversion, *args: Any, **kwargs: Any) -> Any:
        group = group_of(self)
        if group is None or group.num_replicas == 1 or isinstance(fn, _Staying):
            return original(self, fn, *args, **kwargs)
        return original(self, _Staying(fn, group), *args, **kwargs)

    apply_looked_at._is_watched = True  # type: ignore[attr-defined]
    nn.Module._apply = apply_looked_at  # type: ignore[method-assign]


@dataclass(frozen=True, slots=True)
class _Staying:
    """A conversion that leaves a group's variables on its devices."""

    fn: Conversion
    group: ReplicaGroup

    def __call__(self, tensor: Tensor) -> Tensor:
        converted = self.fn(tensor)
        devices = self.group.devices
        if converted.device not in devices and not converted.is_meta:
            names = ", ".join(map(str, devices))
            raise StrategyError(
                f"a mirrored module was to be moved to {converted.device}; its variables live on "
                f"its replicas' devices ({names}), and calls move their arguments there: leave "
                "the move out, or move an ordinary copy, copy.deepcopy(model)"
            )
        return converted
