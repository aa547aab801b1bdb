"""Optimizers that are made while there is a TPUStrategy, which looks for those of a model."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from mirror.server.recording import Model
from mirror.torch_private import wrap_once

_made: weakref.WeakSet[Optimizer] = weakref.WeakSet()


class OptimizersMade:
    """The optimizers that were made since there is a TPUStrategy; it keeps none of them alive."""

    def __init__(self) -> None:
        wrap_once(Optimizer, "__init__", _noting)

    def over(self, model: Model) -> list[Optimizer]:
        """Returns those that hold a parameter of a model, in one order for all runs."""
        ids = {id(tensor) for tensor in model.tensors}
        found = [
            optimizer
            for optimizer in _made
            if any(id(p) in ids for group in optimizer.param_groups for p in group["params"])
        ]
        return sorted(found, key=id)


def _noting(init: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(init)
    def noting(self: Optimizer, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        _made.add(self)

    return noting
