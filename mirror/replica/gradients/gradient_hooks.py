"""Hooks of gradients, ``p.register_hook``: what they get, and where nothing is there for them.

[Note: Gradient hooks]
A hook of a parameter must see what it would see on one device: the gradient of one backward pass
over the whole batch, once; it may clamp it.

    backward()               a pass that reaches a parameter with hooks is reduced when it ends,
                             also under ``no_sync``; the hooks get the first replica's reduced
                             gradient, before it is added to ``.grad``, and the others take the
                             result over
    torch.autograd.grad      outside ``run`` they get the sum over the copies, which is returned;
                             inside, where a replica gets its own gradient, there is none for them
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from mirror.errors import StrategyError
from mirror.replica.gradients.arrivals import Column

if TYPE_CHECKING:
    from mirror.replica.copies.variables import Variable


def run_hooks(variables: list[Variable], columns: list[Column]) -> None:
    """Has the hooks of variables see, and replace, the reduced gradients: a list per replica."""
    for i, variable in enumerate(variables):
        if variable.hooks:
            grad = through_hooks(variable, columns[0][i])
            columns[0][i] = grad
            for column in columns[1:]:
                column[i] = grad.to(column[i].device, copy=True)


def through_hooks(variable: Variable, grad: Tensor, *, is_batched: bool = False) -> Tensor:
    """Returns what a variable's hooks make of a gradient.

    Args:
        is_batched: whether the gradient is many, along a first dimension that no hook is to see.
    """

    def through(grad: Tensor) -> Tensor:
        for hook in tuple(variable.hooks.values()):
            replaced = hook(grad)
            grad = grad if replaced is None else replaced
        return grad

    if not variable.hooks:
        return grad
    return torch.func.vmap(through)(grad) if is_batched else through(grad)


def refuse_hooks_of(inputs: Iterable[Any]) -> None:
    """Raises if ``torch.autograd.grad`` inside ``run`` captures what a hook should see whole.

    Args:
        inputs: whose gradients are captured.
    """
    for captured in inputs:
        variable: Variable | None = getattr(captured, "variable", None)  # of a replica's copy
        if variable is not None and variable.hooks and len(variable.copies) > 1:
            raise StrategyError(
                f"torch.autograd.grad inside strategy.run gives each replica its own gradient, "
                f"but a hook of parameter {variable.name!r} has to see that of the whole batch; "
                "call it outside run, use backward(), or remove the hook"
            )


def refuse_own_hook() -> NoReturn:
    """Raises for a hook that would get one replica's gradient."""
    raise StrategyError(
        "a gradient hook of a parameter sees the gradient of the whole batch, so it is "
        "registered once: call register_hook outside strategy.run, and outside forward"
    )


def refuse_post_accumulate_hook() -> NoReturn:
    """Raises for hooks that want a gradient before it is reduced."""
    raise StrategyError(
        "a post-accumulate hook would run before this parameter's gradient is reduced over the "
        "replicas; read p.grad after backward(), or use register_hook"
    )
