"""Gradient hooks, ``p.register_hook``: what they get, and where nothing is there for them.

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

from collections.abc import Callable, Mapping
from typing import NoReturn

import torch
from torch import Tensor

from mirror.errors import StrategyError

GradientHook = Callable[[Tensor], "Tensor | None"]


def through_hooks(
    hooks: Mapping[int, GradientHook], grad: Tensor, *, is_batched: bool = False
) -> Tensor:
    """Returns what a variable's hooks make of a gradient.

    Args:
        is_batched: whether the gradient is many, along a first dimension that no hook is to see.
    """

    def through(grad: Tensor) -> Tensor:
        for hook in tuple(hooks.values()):
            replaced = hook(grad)
            grad = grad if replaced is None else replaced
        return grad

    if not hooks:
        return grad
    return torch.func.vmap(through)(grad) if is_batched else through(grad)


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
