"""Private names of torch that not every promised version has, and what stands in for them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

Hooks = tuple[Callable[[Any], Any], Callable[[Any], Any]]


def plain_apply() -> Callable[..., Any]:
    """Returns ``torch.autograd.Function.apply`` as a function of the class and the arguments.

    Since torch 2.15 it is a method of C, which has no function of Python inside.
    """
    method: Any = torch.autograd.Function.__dict__["apply"]
    if hasattr(method, "__func__"):
        function: Callable[..., Any] = method.__func__
        return function

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return method.__get__(None, cls)(*args, **kwargs)

    return apply


class _HookStack(threading.local):
    """What each thread pushed and did not pop yet, noted from the import of mirror on.

    Every ``saved_tensors_hooks`` goes through two functions of ``torch._C._autograd``, which are
    looked up there whenever they are called.
    """

    def __init__(self) -> None:
        self.hooks: list[Hooks] = []

    def install(self) -> None:
        names: Any = torch._C._autograd
        push, pop = names._push_saved_tensors_default_hooks, names._pop_saved_tensors_default_hooks

        def noted_push(pack: Callable[[Any], Any], unpack: Callable[[Any], Any]) -> None:
            push(pack, unpack)
            self.hooks.append((pack, unpack))

        def noted_pop() -> None:
            pop()
            if self.hooks:
                self.hooks.pop()

        names._push_saved_tensors_default_hooks = noted_push
        names._pop_saved_tensors_default_hooks = noted_pop

    def top(self) -> Hooks | None:
        return self.hooks[-1] if self.hooks else None


def _find_top() -> Callable[[], Hooks | None]:
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    if top is not None:
        return partial(top, False)
    stack = _HookStack()
    stack.install()
    return stack.top


# Returns the calling thread's innermost ``saved_tensors_hooks``, ``None`` if there are none.
# Torch has ``_top_saved_tensors_default_hooks`` since 2.8.
top_saved_tensors_hooks = _find_top()
