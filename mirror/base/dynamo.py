"""Control of Dynamo: functions it must not trace, and its callback on the replicas' threads.

[Note: Compiled calls]
Problem: in compiled code, the interpreter passes each new frame of the thread to Dynamo's
callback, which traces it with all it calls. Dynamo cannot trace a split call, which continues on
other threads, nor the lockstep.

    compiled code                         rule
    the model, by torch.compile(model)    the compiled call is split, outside Dynamo; each replica
    or model.compile()                    makes it on its thread, with or without fullgraph
    a function that calls the model,      the graph breaks at the model; the replicas run it with
    outside run                           the callback of the thread that split the call
    a function inside run                 traced, with the replica's copies as parameters; the
                                          graph breaks at merges
    optimizer.step()                      the graph breaks, and the step runs uncompiled

The guards contain the replica id, so every replica compiles once, one at a time. If torch lacks
the private names used here, calls of compiled modules raise. mirror does not import torch._dynamo.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from mirror.base.torch_private import TORCH_RANGE
from mirror.errors import StrategyError

try:
    from torch._C._dynamo.eval_frame import (
        _FrameAction,
        _FrameExecStrategy,
        set_code_exec_strategy,
        set_eval_frame,
    )
except ImportError:  # another torch than the ones this was written for
    _IS_KNOWN = False
else:
    _IS_KNOWN = True

DynamoCallback = Any  # None, False (only run code that is compiled already), or a callable

# Suspends Dynamo on the calling thread, and returns its callback for ``resume_dynamo``, which
# restores it there. Every split call and every merge needs both, so they are functions in C.
suspend_dynamo: Callable[[], DynamoCallback] = partial(set_eval_frame, None) if _IS_KNOWN else bool
resume_dynamo: Callable[[DynamoCallback], object] = set_eval_frame if _IS_KNOWN else bool

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])

_WHY = (
    "mirror's replicas take turns in threads of their own there; what fullgraph=True covers must "
    "be a mirrored model itself, compiled after it was mirrored, or be called by strategy.run"
)
# The modules of torch that raise errors of tracing and compiling.
TRACERS = ("torch._subclasses.", "torch._dynamo.", "torch._inductor.", "torch.fx.")
_UNLIMITED = nullcontext()
_LIMITS = ("recompile_limit", "accumulated_recompile_limit")


def disable_dynamo(function: FunctionT) -> FunctionT:
    """Decorates a function that Dynamo skips, with all it calls: the graph breaks there."""
    _mark(function)
    if _IS_KNOWN:
        _set_actions(function, _FrameAction.SKIP, _FrameAction.SKIP)
    return function


def disable_and_suspend(function: FunctionT) -> FunctionT:
    """Decorates a function that Dynamo skips and that calls ``suspend_dynamo`` itself."""
    _mark(function)
    return skip_frame(function)


def skip_frame(function: FunctionT) -> FunctionT:
    """Decorates a function that is not compiled itself; its callees and callers may be."""
    if _IS_KNOWN:
        _set_actions(function, _FrameAction.SKIP, _FrameAction.DEFAULT)
    return function


def call_under_dynamo(
    dynamo_callback: DynamoCallback, module: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    """Calls a module, or its method, on a replica's thread with the callback of the splitting."""
    if not dynamo_callback:
        return module(*args, **kwargs)
    # Imported already: there is a callback.
    from torch._dynamo import trace_rules
    from torch._dynamo.external_utils import wrap_inline

    # Dynamo does not start at a function of torch; the frame of wrap_inline is an exception.
    owner: Any = getattr(module, "__self__", module)
    call = wrap_inline(module) if trace_rules.check(owner.forward) else module
    prior = set_eval_frame(dynamo_callback)
    try:
        return call(*args, **kwargs)
    finally:
        set_eval_frame(prior)


def limits_for(num_replicas: int) -> AbstractContextManager[None]:
    """Returns a context in which each replica may compile a function as often as one device."""
    frames = sys.modules.get("torch._dynamo.eval_frame")  # as _is_used, without a call
    if frames is None or not frames.always_optimize_code_objects.values:
        return _UNLIMITED
    return _raising_limits(num_replicas)


@contextmanager
def _raising_limits(num_replicas: int) -> Iterator[None]:
    # Not config.patch: each patch makes a context variable that the thread's context never
    # drops, so one per step would be a leak.
    config = sys.modules["torch._dynamo.config"]
    limits = {name: getattr(config, name) for name in _LIMITS}
    try:
        for name, limit in limits.items():
            setattr(config, name, limit * num_replicas)
        yield
    finally:
        for name, limit in limits.items():
            setattr(config, name, limit)


def num_compiled_frames() -> int:
    """Returns how many frames Dynamo has traced, or has tried to, in this process."""
    utils = sys.modules.get("torch._dynamo.utils")
    return 0 if utils is None else int(utils.counters["frames"]["total"])


def forget_compiled() -> None:
    """Drops all compiled code; functions are compiled again at their next call."""
    if _is_used():
        torch._dynamo.reset_code_caches()


def is_compiled_module(module: nn.Module) -> bool:
    """Whether a module is the result of ``torch.compile(module)``."""
    frames = sys.modules.get("torch._dynamo.eval_frame")
    return frames is not None and isinstance(module, frames.OptimizedModule)


def compiles_backward() -> bool:
    """Whether compiled autograd is active, which compiles backward passes."""
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    return compiled is not None and bool(compiled.compiled_autograd_enabled)


def refuse_unknown_compiler() -> None:
    """Raises StrategyError if this torch lacks the names that keep Dynamo out of split calls."""
    if not _IS_KNOWN:
        raise StrategyError(
            f"torch {torch.__version__} lacks the functions by which mirror keeps torch.compile "
            f"out of split calls; use one of {TORCH_RANGE}, or leave the model uncompiled"
        )


def _is_used() -> bool:
    """Whether torch.compile has been used in this process."""
    frames = sys.modules.get("torch._dynamo.eval_frame")
    return frames is not None and bool(frames.always_optimize_code_objects.values)


def _mark(function: Any) -> None:
    # The marks of torch.compiler.disable, which itself would import the whole compiler.
    function._torchdynamo_disable = True
    function._torchdynamo_disable_msg = _WHY


def _set_actions(function: Any, own: Any, below: Any) -> None:
    set_code_exec_strategy(function.__code__, _FrameExecStrategy(own, below))
