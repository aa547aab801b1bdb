"""torch.compile: what it must not follow, and its hold on a thread, handed on to the replicas.

[Note: Compiled calls]
While compiled code runs, the compiler has a hold on its thread: the interpreter shows it every
function that begins, and it follows that function through all it calls. It cannot follow a call
that is split, because other threads go on with it, nor may it look into the lockstep.

    what is compiled                      what happens
    the model, by torch.compile(model)    the compiled call is split, outside the compiler; each
    or model.compile()                    replica makes it on its thread, fullgraph or not
    a function that calls the model,      the graph breaks at the model; the replicas run it under
    outside run                           the hold of the thread that split the call
    a function inside run                 followed, with the replica's copies as parameters; the
                                          graph breaks at what merges the replicas
    optimizer.step()                      the graph breaks, and the step runs uncompiled

The compiler guards on the replica's index, so every replica compiles once; its one lock serialises
them. The names used of torch._C are not public: without them calls of compiled modules raise. Nor
are those of torch._dynamo, which are looked up when they are used: mirror does not import it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
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

DynamoCallback = Any  # None, False (run what is compiled already), or what the interpreter calls
FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])

_WHY = (
    "mirror's replicas take turns in threads of their own there; what fullgraph=True covers must "
    "be a mirrored model itself, compiled after it was mirrored, or be called by strategy.run"
)
# The modules of torch whose errors are of tracing and compiling.
TRACERS = ("torch._subclasses.", "torch._dynamo.", "torch._inductor.", "torch.fx.")
_UNLIMITED = nullcontext()
_LIMITS = ("recompile_limit", "accumulated_recompile_limit")


def disable_dynamo(function: FunctionT) -> FunctionT:
    """Marks what the compiler does not follow: its graph breaks there, all below runs as it is."""
    _mark(function)
    if _IS_KNOWN:
        _set_actions(function, _FrameAction.SKIP, _FrameAction.SKIP)
    return function


def disable_and_suspend(function: FunctionT) -> FunctionT:
    """Marks what the compiler does not follow and which calls ``suspend_dynamo`` itself."""
    _mark(function)
    return skip_frame(function)


def skip_frame(function: FunctionT) -> FunctionT:
    """Has no code made of ``function`` itself; what it calls, and who calls it, may have."""
    if _IS_KNOWN:
        _set_actions(function, _FrameAction.SKIP, _FrameAction.DEFAULT)
    return function


def suspend_dynamo() -> DynamoCallback:
    """Takes the compiler's hold off the calling thread and returns it, for ``resume_dynamo``."""
    return set_eval_frame(None) if _IS_KNOWN else None


def resume_dynamo(hold: DynamoCallback) -> None:
    """Puts the compiler's hold on the calling thread."""
    if _IS_KNOWN:
        set_eval_frame(hold)


def call_under_dynamo(hold: DynamoCallback, module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Calls ``module`` on a replica's thread under the hold of the thread that split the call."""
    if not hold:
        return module(*args, **kwargs)
    # Loaded already: there is a hold.
    from torch._dynamo import trace_rules
    from torch._dynamo.external_utils import wrap_inline

    # The compiler begins with no function of torch's own; this frame is not.
    call = wrap_inline(module) if trace_rules.check(module.forward) else module
    prior = set_eval_frame(hold)
    try:
        return call(*args, **kwargs)
    finally:
        set_eval_frame(prior)


def limits_for(num_replicas: int) -> AbstractContextManager[None]:
    """Lets every replica compile a function as often as one device may."""
    return _raised_limits(num_replicas) if _is_used() else _UNLIMITED


@contextmanager
def _raised_limits(num_replicas: int) -> Iterator[None]:
    # Not config.patch: each patch makes a context variable, and the thread's context keeps it for
    # good. One a step would be a leak.
    config = sys.modules["torch._dynamo.config"]
    limits = {name: getattr(config, name) for name in _LIMITS}
    try:
        for name, limit in limits.items():
            setattr(config, name, limit * num_replicas)
        yield
    finally:
        for name, limit in limits.items():
            setattr(config, name, limit)


def forget_compiled() -> None:
    """Has all that is compiled compiled anew, when it is next called."""
    if _is_used():
        torch._dynamo.reset_code_caches()


def is_compiled(module: nn.Module) -> bool:
    """Whether a module is what ``torch.compile(module)`` returned."""
    frames = sys.modules.get("torch._dynamo.eval_frame")
    return frames is not None and isinstance(module, frames.OptimizedModule)


def compiles_backward() -> bool:
    """Whether what goes on in a backward pass is being compiled."""
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    return compiled is not None and bool(compiled.compiled_autograd_enabled)


def refuse_unknown_compiler() -> None:
    """Raises StrategyError if this torch cannot be kept from following split calls."""
    if not _IS_KNOWN:
        raise StrategyError(
            f"torch {torch.__version__} lacks the functions by which mirror keeps torch.compile "
            f"out of split calls; use one of {TORCH_RANGE}, or leave the model uncompiled"
        )


def _is_used() -> bool:
    """Whether anything in this process has been given to torch.compile."""
    frames = sys.modules.get("torch._dynamo.eval_frame")
    return frames is not None and bool(frames.always_optimize_code_objects.values)


def _mark(function: Any) -> None:
    # What torch.compiler.disable marks, which would import the whole compiler.
    function._torchdynamo_disable = True
    function._torchdynamo_disable_msg = _WHY


def _set_actions(function: Any, own: Any, below: Any) -> None:
    set_code_exec_strategy(function.__code__, _FrameExecStrategy(own, below))
