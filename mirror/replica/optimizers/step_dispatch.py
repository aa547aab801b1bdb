"""Whose step it is, when every replica calls ``optimizer.step()`` inside ``run``.

[Note: Whose step]
A step may change more than parameters and ``state``: it counts on ``self``, adds to a tensor in a
group, keeps lists, wraps another optimizer. Only of torch's own classes is it known that it does
not. So:

    class of the optimizer            inside run                       outside
    torch.optim's own                 every replica's, or one for      the same; with closures or
                                      all on one device                hooks: once
    a subclass of these that keeps    the first one's, then the        once
    only numbers, names and lists     others', unless it has changed
                                      what it keeps: then once
    any other, and LBFGS              once                             once
    with a home of its own: torch's   one, at home                     one, at home; with closures
    own without hooks                                                  or hooks: once
    any other there                   once                             once

"Once" is over the mirrored parameters, in the cross-replica context; the others take over what
has changed (see [Note: Once] in ``once.py``). Over several GPUs that costs a broadcast of the
parameters; the state stays with the first replica until others look at it.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator
from functools import cache, lru_cache
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch.optim import Optimizer

from mirror.base.torch_private import put_hooks_around
from mirror.devices import random_state
from mirror.errors import StrategyError
from mirror.execution.replicas import Replica
from mirror.replica.optimizers.global_hooks import has_hooks
from mirror.replica.optimizers.group_options import options_of, refuse_different
from mirror.replica.optimizers.merge_call_shared import (
    is_watched,
    merge_call_shared,
    watched,
    wrap_in_subclasses,
)
from mirror.replica.optimizers.param_groups import refuse_what_is_not_mirrored, replicas_reached

_TORCHS = "torch.optim."
_DECORATORS = 4  # that may stand between a step and the one that it calls
_LEAVES = (
    *(type(None), bool, int, float, complex, str, bytes, type, torch.dtype, torch.device),
    *(FunctionType, BuiltinFunctionType, MethodType, range),
)
_MOST_VALUES = 1000  # of an optimizer that are compared
# What torch keeps on an optimizer, and mirror; of no consequence for a step, or known otherwise.
_KNOWN = frozenset(
    "state param_groups _mirror _opt_called _optimizer_step_pre_hooks _optimizer_step_post_hooks "
    "_optimizer_state_dict_pre_hooks _optimizer_state_dict_post_hooks "
    "_optimizer_load_state_dict_pre_hooks _optimizer_load_state_dict_post_hooks "
    "_warned_capturable_if_run_uncaptured _need_device_dtype_check_for_fused".split()
)


def watch_steps(step_by_turns: Callable[..., Any]) -> None:
    """Has every optimizer class's ``step`` ask here first; call it once.

    Args:
        step_by_turns: steps an optimizer whose steps may be every replica's.
    """
    _by_turns.append(step_by_turns)
    profile = put_hooks_around

    def profile_watched(step: Callable[..., Any]) -> Callable[..., Any]:
        # Torch puts its hooks around a step when the first optimizer of a class is made.
        return _watched_step(profile(step.__wrapped__ if is_watched(step) else step))  # type: ignore[attr-defined]

    Optimizer.profile_hook_step = staticmethod(profile_watched)  # type: ignore[method-assign, assignment]
    wrap_in_subclasses(Optimizer, "step", _watched_step)


@cache
def _hooked_code() -> Any:
    """The code of what torch puts around every class's step, to call hooks; all have one."""
    return put_hooks_around(lambda self: None).__code__


_by_turns: list[Callable[..., Any]] = []


def _watched_step(step: Callable[..., Any]) -> Callable[..., Any]:
    return watched(step, _step_in_run, _step_failed)


def _step_failed(optimizer: Optimizer, error: BaseException) -> None:
    mirror: Any = vars(optimizer).get("_mirror")
    if mirror is not None:
        mirror.end_failed(error)


def is_torchs_own(kind: type) -> bool:
    """Whether steps of a class change nothing but parameters and state."""
    step = getattr(kind, "step", None)  # a class mixed in has none
    return step is not None and _is_torchs_own(kind, step)


@lru_cache(maxsize=256)
def _is_torchs_own(kind: type, step: Callable[..., Any]) -> bool:
    return (
        kind.__module__.startswith(_TORCHS)
        and kind is not Optimizer
        and raw_step(kind).__module__.startswith(_TORCHS)
        and not issubclass(kind, torch.optim.LBFGS)
    )


def raw_step(kind: type) -> Callable[..., Any]:
    """Returns the class's step without what mirror, and torch's hooks, have put around it."""
    step: Any = kind.step  # type: ignore[attr-defined]
    # Either may have come first, and ``hooked``, torch's mark, is then on the other.
    while is_watched(step) or getattr(step, "__code__", None) is _hooked_code():
        step = step.__wrapped__
    raw: Callable[..., Any] = step
    return raw


def _step_in_run(
    step: Callable[..., Any], optimizer: Any, context: Replica, args: Any, kwargs: Any
) -> Any:
    kind = type(optimizer)
    if context.tracing is not None:
        return step(optimizer, *args, **kwargs)
    _refuse_wrappers(optimizer)
    is_apart = context.replicas.has_parameter_device
    if is_torchs_own(kind) and not (is_apart and has_hooks(optimizer)):
        return step(optimizer, *args, **kwargs)
    if replicas_reached(optimizer) is not context.replicas:
        return step(optimizer, *args, **kwargs)
    if any(lent.is_within_step(sys._getframe()) for lent in context.lent):
        return step(optimizer, *args, **kwargs)  # a subclass's step has called its base's
    if not is_apart and _may_step_by_turns(optimizer) and not (args or kwargs):
        return _by_turns[0](step, optimizer, context)
    result, _ = merge_call_shared(
        context,
        _once(step, context),
        optimizer,
        args,
        kwargs,
        seen=options_of(optimizer),
        check=lambda seen: refuse_different(optimizer, seen, "before a step"),
    )
    return result


def _refuse_wrappers(optimizer: Optimizer) -> None:
    """Raises if the step of something like an optimizer, but none of torch's kind, steps one."""
    frame: Any = sys._getframe(3)  # who has called step
    for _ in range(_DECORATORS):
        if frame is None:
            return
        code = frame.f_code
        if code.co_name == "step" and code.co_argcount:
            caller = frame.f_locals.get(code.co_varnames[0])
            looks_like_one = "param_groups" in getattr(caller, "__dict__", ()) or hasattr(
                type(caller), "param_groups"
            )
            if looks_like_one and not isinstance(caller, Optimizer):
                if any(value is optimizer for value in getattr(caller, "__dict__", {}).values()):
                    name = type(caller).__name__
                    raise StrategyError(
                        f"{name}.step wraps a {type(optimizer).__name__}, but {name} is no "
                        "torch.optim.Optimizer: inside strategy.run every replica would run its "
                        "code, on what all share; call it outside, or derive the class from "
                        "torch.optim.Optimizer, whose steps are made once"
                    )
        frame = frame.f_back


def _may_step_by_turns(optimizer: Optimizer) -> bool:
    mirror: Any = vars(optimizer).get("_mirror")
    return (
        any(map(is_torchs_own, type(optimizer).__mro__[1:-2]))
        and not (mirror is not None and mirror.steps_once)
        and kept_by(optimizer) is not None
    )


def _once(step: Callable[..., Any], context: Replica) -> Callable[..., Any]:
    """Returns a step over mirrored parameters, in the cross-replica context."""

    def once(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        refuse_what_is_not_mirrored(optimizer)
        evaluates = any(map(callable, (*args, *kwargs.values())))  # forward may draw
        if evaluates:
            result = step(optimizer, *args, **kwargs)
        else:
            home = context.replicas.devices[0]
            result = refusing_draws(lambda: step(optimizer, *args, **kwargs), home)
        mirror = vars(optimizer).get("_mirror")
        if mirror is not None:
            context.run.stepped.setdefault(mirror, {})  # its options are compared when run ends
        return result

    once.__name__ = "step"
    return once


def refusing_draws(step: Callable[[], Any], device: torch.device) -> Any:
    """Calls a step inside ``run``.

    Raises:
        StrategyError: it has drawn random numbers. Torch's own optimizers draw none.
    """
    before = random_state(device)
    result = step()
    if not torch.equal(before, random_state(device)):
        raise StrategyError(
            "this optimizer's step draws random numbers, which inside strategy.run come from "
            "streams that every replica has of its own; call step outside strategy.run"
        )
    return result


# What an optimizer keeps besides parameters and state, in a form that can be compared.


def kept_by(optimizer: Optimizer) -> tuple[Any, ...] | None:
    """Returns what a step may change besides parameters and state, to be compared.

    What the optimizer and its groups hold; and of its class, and of what its step refers to
    outside of itself, what consists of numbers, names and containers of these.

    Returns:
        ``None`` if the optimizer holds anything else.
    """
    own = [value for name, value in vars(optimizer).items() if name not in _KNOWN]
    options = [
        [value for name, value in options.items() if name != "params"]
        for options in optimizer.param_groups
    ]
    budget = [_MOST_VALUES]
    kept = [_frozen(vars(optimizer).keys(), budget), _frozen((own, options), budget)]
    if None in kept:
        return None
    return (*kept, *(_frozen(value, budget) for value in _around(type(optimizer))))


def _around(kind: type) -> Iterator[Any]:
    for cls in kind.__mro__:
        if cls.__module__.startswith(("torch.", "builtins")):
            continue
        for value in tuple(vars(cls).values()):
            if not callable(value):
                yield value
        step = vars(cls).get("step")
        while step is not None:
            code = getattr(step, "__code__", None)
            if code is not None:
                for cell in step.__closure__ or ():
                    try:
                        yield cell.cell_contents
                    except ValueError:  # not set yet
                        yield None
                for name in code.co_names:
                    yield step.__globals__.get(name)
            step = getattr(step, "__wrapped__", None)


def _frozen(value: Any, budget: list[int]) -> Any:
    """Returns a plain value as one that stays as it is; ``None`` if it is not plain."""
    budget[0] -= 1
    if budget[0] < 0:
        return None
    if isinstance(value, (FunctionType, MethodType, BuiltinFunctionType, type, ModuleType)):
        return id(value)
    if isinstance(value, _LEAVES):
        return (type(value), repr(value) if isinstance(value, float) else value)
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    elif not isinstance(value, (list, tuple, set, frozenset, deque, type({}.keys()))):
        return None
    items = tuple(_frozen(item, budget) for item in value)
    return None if None in items else items
