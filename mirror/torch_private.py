"""Private names of torch that not every promised version has, and what stands in for them."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from functools import partial
from types import ClassMethodDescriptorType
from typing import Any

import torch

Hooks = tuple[Callable[[Any], Any], Callable[[Any], Any]]
Function = Callable[..., Any]

_WRAPS = "_mirror_wraps"  # on what has been wrapped: owner, name and wrapper of each wrapping
_wrapping = threading.RLock()


def wrap_once(owner: Any, name: str, wrapper: Callable[[Function], Function]) -> bool:
    """Replaces an attribute of a class or a module by ``wrapper(original)``: once, for good.

    The wrapper gets a plain function, of ``cls`` and the arguments if it is a class method, and
    what it returns becomes of the same kind, with the name and docstring of the original. What
    others have put around it since stays around it. Every wrapper has its own turn; that one is
    known by its place in its file, so it may be a local function.

    Returns:
        Whether it has been done now, and not before.

    Raises:
        AttributeError: there is no such attribute.
    """
    key = (owner, name, f"{wrapper.__module__}.{wrapper.__qualname__}")
    with _wrapping:
        kind, original = _kind_and_function(owner, name)
        known = getattr(original, _WRAPS, ())
        if key in known:
            return False
        function = wrapper(original)
        own = dict(vars(function))
        functools.update_wrapper(function, original)
        vars(function).update(own, **{_WRAPS: (*known, key)})
        setattr(owner, name, function if kind is None else kind(function))
        return True


def plain_apply() -> Function:
    """Returns ``torch.autograd.Function.apply`` as a function of the class and the arguments."""
    return _kind_and_function(torch.autograd.Function, "apply")[1]


def _kind_and_function(owner: Any, name: str) -> tuple[type[Any] | None, Function]:
    """Returns an attribute as a plain function, and what kind of method it is if not a plain one.

    A class method that is written in C, as Function.apply is since torch 2.15, has no function
    of Python inside.
    """
    found: Any = inspect.getattr_static(owner, name)
    if isinstance(found, (classmethod, staticmethod)):
        return type(found), found.__func__
    if not isinstance(found, ClassMethodDescriptorType):
        return None, found

    @functools.wraps(found)
    def function(cls: type[Any], *args: Any, **kwargs: Any) -> Any:
        return found.__get__(None, cls)(*args, **kwargs)

    return classmethod, function


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
