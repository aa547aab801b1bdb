"""Gradient hooks, ``p.register_hook``: which gradient they get, and which hooks are refused.

A parameter's hook must see what it would see on one device: once per backward pass, the gradient
over the whole batch, which it may replace.

    backward()               a pass that reaches a parameter with hooks is reduced when it ends,
                             also under ``no_sync``; the hooks get the first replica's reduced
                             gradient before it is added to ``.grad``, and all replicas take their
                             result
    torch.autograd.grad      outside ``run`` the hooks get the sum over the copies, which is
                             returned; inside, where a replica gets its own gradient, it raises
                             StrategyError for a parameter with hooks
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
    """Returns a gradient after it has passed through a variable's hooks.

    Args:
        is_batched: whether the first dimension enumerates gradients; hooks do not see it.
    """

    def call_hooks(grad: Tensor) -> Tensor:
        for hook in tuple(hooks.values()):
            replaced = hook(grad)
            grad = grad if replaced is None else replaced
        return grad

    if not hooks:
        return grad
    return torch.func.vmap(call_hooks)(grad) if is_batched else call_hooks(grad)


def refuse_own_hook() -> NoReturn:
    """Raises StrategyError: the hook would get one replica's gradient."""
    raise StrategyError(
        "a gradient hook of a parameter sees the gradient of the whole batch, so it is "
        "registered once: call register_hook outside strategy.run, and outside forward"
    )


def refuse_post_accumulate_hook() -> NoReturn:
    """Raises StrategyError: the hook would run before the gradient is reduced."""
    raise StrategyError(
        "a post-accumulate hook would run before this parameter's gradient is reduced over the "
        "replicas; read p.grad after backward(), or use register_hook"
    )
