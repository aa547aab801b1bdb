"""Clearing: ``zero_grad`` in a traced step, which does not ask whether there are gradients.

Torch's own looks whether each is there. A trace would take that for what always is, and every call
would have to look, for the gradients that the call before has left and nobody wants.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from mirror.execution.replicas import current


@contextmanager
def zero_grad_unconditionally(
    tracing: object, clear: Callable[[Iterable[Tensor]], bool]
) -> Iterator[None]:
    """Has ``zero_grad`` of optimizers and modules clear gradients unseen, in a step being traced.

    Args:
        tracing: who follows the step.
        clear: drops the gradients of parameters; returns whether it could.
    """
    kinds: Any = (Optimizer, nn.Module)
    originals: list[Any] = [kind.zero_grad for kind in kinds]

    def is_traced() -> bool:
        return current.replica is not None and current.replica.tracing is tracing

    def of_optimizer(self: Any, set_to_none: bool = True) -> None:
        held = (p for group in self.param_groups for p in group["params"])
        if not (set_to_none and is_traced() and clear(held)):
            originals[0](self, set_to_none)

    def of_module(self: Any, set_to_none: bool = True) -> None:
        if not (set_to_none and is_traced() and clear(self.parameters())):
            originals[1](self, set_to_none)

    try:
        for kind, function in zip(kinds, (of_optimizer, of_module), strict=True):
            kind.zero_grad = function
        yield
    finally:
        for kind, function in zip(kinds, originals, strict=True):
            kind.zero_grad = function
