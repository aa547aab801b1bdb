"""Puts a recorder into torch: around module calls, backward passes and optimizer steps.

The wrappers are in torch while a recording lasts, and are taken out afterwards. Optimizers are
wrapped from outside and not by torch's hooks, whose presence changes how mirror steps.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import Optimizer

from mirror.tools.check.module_names import DROPOUT_LAYERS
from mirror.tools.check.recorder import Recorder

_DROPPING = {  # functions of F, and where p is among the arguments
    "dropout": 1,
    "dropout1d": 1,
    "dropout2d": 1,
    "dropout3d": 1,
    "alpha_dropout": 1,
    "feature_alpha_dropout": 1,
}
_PROBABILITIES = ("dropout", "drop_prob", "drop_rate", "dropout_p", "attention_dropout")


@contextmanager
def patched_torch(recorder: Recorder, *, no_dropout: bool = False) -> Iterator[None]:
    """Has a recorder note what happens inside.

    Args:
        no_dropout: whether to set all dropout probabilities to 0.
    """
    with ExitStack() as stack:
        if no_dropout:
            _stop_dropout(stack)
        _replace(stack, nn.Module, "__call__", _recording_calls(recorder, no_dropout))
        _replace(stack, torch.autograd, "backward", _recording_losses(recorder))
        for kind in _kinds_of(Optimizer):
            if getattr(kind.__dict__.get("step"), "hooked", False):  # one was made before
                _replace(stack, kind, "step", functools.partial(_recording_steps, recorder))
        patch = functools.partial(_patching, recorder, stack)
        _replace(stack, Optimizer, "profile_hook_step", patch)
        yield


def _replace(stack: ExitStack, owner: Any, name: str, wrapper: Callable[[Any], Any]) -> None:
    original = owner.__dict__[name]
    is_static = isinstance(original, staticmethod)
    wrapped = wrapper(original.__func__ if is_static else original)
    setattr(owner, name, staticmethod(wrapped) if is_static else wrapped)
    stack.callback(setattr, owner, name, original)


def _recording_calls(recorder: Recorder, no_dropout: bool) -> Callable[[Any], Any]:
    def wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if no_dropout:
                _without_dropout(self)
            call = functools.partial(original, self)
            return recorder.call(self, call, args, kwargs)

        return __call__

    return wrapper


def _recording_losses(recorder: Recorder) -> Callable[[Any], Any]:
    def wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            roots = tensors if isinstance(tensors, (list, tuple)) else [tensors]
            recorder.note_loss(roots, sys._getframe(1))
            recorder.in_backward += 1
            try:
                return original(tensors, *args, **kwargs)
            finally:
                recorder.in_backward -= 1

        return backward

    return wrapper


def _recording_steps(recorder: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        return recorder.call_step(self, functools.partial(original, self), args, kwargs)

    return step


def _patching(
    recorder: Recorder, stack: ExitStack, original: Callable[..., Any]
) -> Callable[..., Any]:
    """Wraps what torch wraps the step of an optimizer's class in, at its first instance."""

    @functools.wraps(original)
    def profile_hook_step(func: Any) -> Any:
        profiled = original(func)
        wrapped = _recording_steps(recorder, profiled)

        def restore() -> None:
            for kind in _kinds_of(Optimizer):
                if kind.__dict__.get("step") is wrapped:
                    profiled.hooked = True
                    kind.step = profiled  # type: ignore[method-assign]

        stack.callback(restore)
        return wrapped

    return profile_hook_step


def _kinds_of(kind: type[Optimizer]) -> Iterator[type[Optimizer]]:
    yield kind
    for child in kind.__subclasses__():
        yield from _kinds_of(child)


def _stop_dropout(stack: ExitStack) -> None:
    for name, position in _DROPPING.items():
        if hasattr(F, name):
            _replace(stack, F, name, functools.partial(_with_zero, position, "p"))
    attention = functools.partial(_with_zero, 4, "dropout_p")
    _replace(stack, F, "scaled_dot_product_attention", attention)
    _replace(stack, torch, "dropout", functools.partial(_with_zero, 1, "p"))


def _with_zero(position: int, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function whose probability is always 0."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if len(args) > position:
            args = (*args[:position], 0.0, *args[position + 1 :])
        else:
            kwargs[name] = 0.0
        return original(*args, **kwargs)

    return call


def _without_dropout(module: nn.Module) -> None:
    """Sets the probabilities among a module's attributes to 0."""
    attributes: dict[str, Any] = vars(module)
    for name in _PROBABILITIES:
        if isinstance(attributes.get(name), float) and attributes[name]:
            setattr(module, name, 0.0)
    kind = type(module).__name__
    is_dropping = isinstance(module, DROPOUT_LAYERS) or "DropPath" in kind
    if (is_dropping or kind == "StochasticDepth") and attributes.get("p"):
        module.p = 0.0  # type: ignore[assignment]
