"""Names of modules and parameters: the variable of the script, then the path inside."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

_LIBRARIES = (f"{torch.__path__[0]}/", f"{Path(__file__).resolve().parents[2]}/")


DROPOUT_LAYERS = (
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
    *(nn.AlphaDropout, nn.FeatureAlphaDropout),
)


class ModuleNames:
    """Names each module at its first call from the script, and all modules inside it."""

    def __init__(self) -> None:
        self._modules: dict[int, tuple[Any, str]] = {}  # by id: a weak reference and the name
        self._params: dict[int, tuple[Any, str]] = {}
        self._roots: dict[str, weakref.ref[nn.Module]] = {}

    def name_of(self, module: nn.Module, frame: FrameType | None = None) -> str:
        """Returns the name of a module.

        Args:
            frame: where it is called; the variable there names a module that is not known yet.
        """
        known = self._modules.get(id(module))
        if known is not None and known[0]() is module:
            return known[1]
        variable = _variable_of(module, frame) or type(module).__name__
        label, number = variable, 1
        while label in self._roots:
            number += 1
            label = f"{variable}#{number}"
        self._roots[label] = weakref.ref(module)
        for name, child in module.named_modules():
            path = f"{label}.{name}" if name else label
            self._modules[id(child)] = weakref.ref(child), path
        for name, param in module.named_parameters():
            self._params.setdefault(id(param), (weakref.ref(param), f"{label}.{name}"))
        return label

    def parameters_of(self, optimizer: torch.optim.Optimizer) -> Iterator[tuple[Any, str]]:
        """Yields the parameters of an optimizer with their names."""
        for g, group in enumerate(optimizer.param_groups):
            for i, param in enumerate(group["params"]):
                known = self._params.get(id(param))
                is_known = known is not None and known[0]() is param
                yield param, known[1] if known and is_known else f"parameter {i} of group {g}"

    def buffers(self) -> Iterator[tuple[Any, str]]:
        """Yields the buffers of all modules that the script has called, with their names."""
        for label, reference in list(self._roots.items()):
            module = reference()
            if module is not None:
                yield from ((buffer, f"{label}.{name}") for name, buffer in module.named_buffers())


def describe_module(module: nn.Module) -> dict[str, Any]:
    """Returns the facts of a module that tell the cause of a difference."""
    info: dict[str, Any] = {"class": type(module).__name__}
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        info["norm"] = bool(module.training or module.running_mean is None)
    if isinstance(module, DROPOUT_LAYERS):
        info["dropout"] = bool(module.training and module.p > 0)
    elif module.training and isinstance(getattr(module, "dropout", None), float):
        info["dropout"] = bool(module.dropout)
    return info


def is_of_torch(module: nn.Module) -> bool:
    """Whether a module's class is one of torch's own."""
    return type(module).__module__.startswith("torch.")


def _variable_of(module: nn.Module, frame: FrameType | None) -> str:
    """Returns the name of the variable that holds a module where the script calls it."""
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    if frame is None:
        return ""
    for names in (frame.f_locals, frame.f_globals):
        for name, value in list(names.items()):
            if value is module:
                return str(name)
    for name, value in list(frame.f_locals.items()):
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            for key, inner in list(attributes.items()):
                if inner is module:
                    return f"{name}.{key}"
    return ""
