"""What a diagnosis needs to know of a module, and the tensors in its arguments and outputs."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from mirror.values import PerReplica

DROPOUT_LAYERS = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)
_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


def describe_module(module: nn.Module) -> dict[str, Any]:
    """Returns what a diagnosis needs to know of a module."""
    info: dict[str, Any] = {"class": type(module).__name__}
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        tracks = module.training or module.running_mean is None
        info["norm"] = bool(tracks)
    if isinstance(module, DROPOUT_LAYERS):
        info["dropout"] = bool(module.training and module.p > 0)
    elif module.training and getattr(module, "dropout", None).__class__ is float:
        info["dropout"] = bool(module.dropout)
    if isinstance(module, _INSTANCE_NORMS):
        info["instance"] = True
    return info


def tensors_in(values: Any, found: list[Tensor] | None = None, depth: int = 0) -> list[Tensor]:
    """Returns the tensors in a structure, those of a PerReplica that agree once."""
    found = [] if found is None else found
    if isinstance(values, Tensor):
        if not values.is_meta and not values.is_quantized:
            found.append(values)
    elif isinstance(values, PerReplica):
        pass  # parts that could not be joined
    elif depth < 6:
        children: Any = ()
        if isinstance(values, dict):
            children = list(values.values())
        elif isinstance(values, (list, tuple)):
            children = values
        elif hasattr(values, "__dataclass_fields__"):
            children = list(vars(values).values())
        for child in children:
            tensors_in(child, found, depth + 1)
    return found
