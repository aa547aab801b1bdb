"""Decides how often an optimizer steps inside ``run``, from its class and from what it keeps.

[Note: Step dispatch]
Which replicas make a step, if every replica calls ``optimizer.step()`` inside ``run``?
Problem: a step may change more than parameters and ``state``: it counts on ``self``, adds to a
tensor in a group, keeps lists, wraps another optimizer. Only torch's own classes certainly do not.

    class of the optimizer            inside run                       outside
    torch.optim's own                 every replica's, or one for      the same; with closures or
                                      all on one device                hooks: once
    a subclass of these that keeps    the first one's, then the        once
    only numbers, names and lists     others', unless the first one
                                      changed these: then once
    any other, and LBFGS              once                             once
    with a parameter device:          one, on that device              one, on that device; with
    torch's own without hooks                                          closures or hooks: once
    any other there                   once                             once

"Once" is a step over the mirrored parameters, in the cross-replica context; all replicas get the
changes. Over several GPUs that costs a broadcast of the parameters; the state stays with the first
replica until other replicas read it.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator
from functools import cache, lru_cache
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mirror.base.torch_private import put_hooks_around
from mirror.devices import random_state
from mirror.errors import StrategyError
from mirror.replica.optimizers.merge_call_shared import is_wrapper

_TORCHS = "torch.optim."
_DECORATORS = 4  # frames that may lie between a step and the step that it calls

_LEAVES = (
    *(type(None), bool, int, float, complex, str, bytes, type, torch.dtype, torch.device),
    *(FunctionType, BuiltinFunctionType, MethodType, range),
)

_NUMBERS = (type(None), bool, int, float, complex, str)
_OPTIONS = (*_NUMBERS, tuple, Tensor)
_MOST_VALUES = 1000  # of an optimizer are compared


# Attributes that torch and mirror set on an optimizer. They do not matter for a step, or are
# checked elsewhere.
_KNOWN = frozenset(
    "state param_groups _mirror _mirror_step_hooks _opt_called "
    "_optimizer_step_pre_hooks _optimizer_step_post_hooks "
    "_optimizer_state_dict_pre_hooks _optimizer_state_dict_post_hooks "
    "_optimizer_load_state_dict_pre_hooks _optimizer_load_state_dict_post_hooks "
    "_warned_capturable_if_run_uncaptured _need_device_dtype_check_for_fused".split()
)


@cache
def hooked_code() -> Any:
    """Returns the code of torch's function around a class's step, which calls hooks."""
    return put_hooks_around(lambda self: None).__code__


def is_torchs_own(kind: type) -> bool:
    """Whether steps of a class change nothing but parameters and state."""
    step = getattr(kind, "step", None)  # a class mixed in has none
    return step is not None and _is_torchs_own(kind, step)


@lru_cache(maxsize=256)
def _is_torchs_own(kind: type, step: Callable[..., Any]) -> bool:
    return (
        f"{kind.__module__}.".startswith(_TORCHS)  # that of some is torch.optim itself
        and kind is not Optimizer
        and raw_step(kind).__module__.startswith(_TORCHS)
        and not issubclass(kind, torch.optim.LBFGS)
    )


def raw_step(kind: type) -> Callable[..., Any]:
    """Returns the class's step without the wrappers of mirror and of torch's hooks."""
    return _unwrap(kind.step)  # type: ignore[attr-defined]


@lru_cache(maxsize=256)
def _unwrap(step: Any) -> Callable[..., Any]:
    # Either may have come first, and ``hooked``, torch's mark, is then on the other.
    while is_wrapper(step) or getattr(step, "__code__", None) is hooked_code():
        step = step.__wrapped__
    raw: Callable[..., Any] = step
    return raw


def refuse_wrappers(optimizer: Optimizer) -> None:
    """Raises StrategyError if an object with ``param_groups`` that is no Optimizer steps one."""
    frame: Any = sys._getframe(3)  # the caller of step
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
                        "code, on tensors that all replicas share; call it outside, or derive "
                        "the class from torch.optim.Optimizer: then it steps once"
                    )
        frame = frame.f_back


def may_step_leader_first(optimizer: Optimizer) -> bool:
    mirror: Any = vars(optimizer).get("_mirror")
    return (
        any(map(is_torchs_own, type(optimizer).__mro__[1:-2]))
        and not (mirror is not None and mirror.steps_once)
        and extra_state_of(optimizer) is not None
    )


def step_without_draws(step: Callable[[], Any], device: torch.device) -> Any:
    """Calls a step inside ``run``.

    Raises:
        StrategyError: it has drawn random numbers. Torch's own optimizers draw none.
    """
    # It may draw from the generator of its device, and from that of the CPU.
    devices = {device, torch.device("cpu")}
    before = [random_state(each) for each in devices]
    result = step()
    if not all(map(torch.equal, before, map(random_state, devices))):
        raise StrategyError(
            "this optimizer's step draws random numbers, which inside strategy.run come from "
            "streams that every replica has of its own; call step outside strategy.run"
        )
    return result


# The values that an optimizer keeps beyond parameters and state, in a comparable form.


def extra_state_of(optimizer: Optimizer, *, with_numbers: bool = True) -> tuple[Any, ...] | None:
    """Returns the values that a step may change in addition to parameters and state.

    These are attributes of the optimizer, options of its groups, attributes of its class, and the
    free variables and globals of its step: numbers, names and containers of these.

    Args:
        with_numbers: whether attributes and options that are numbers or names are included; of
            options also tuples and tensors.

    Returns:
        ``None`` if the optimizer or its groups hold anything else.
    """
    numbers = () if with_numbers else numbers_of(optimizer)
    own = [v for n, v in vars(optimizer).items() if n not in _KNOWN and n not in numbers]
    options = [
        [
            value
            for name, value in options.items()
            if name != "params" and (with_numbers or not isinstance(value, _OPTIONS))
        ]
        for options in optimizer.param_groups
    ]
    budget = [_MOST_VALUES]
    names = [name for name in vars(optimizer) if name not in numbers]
    kept = [_freeze(names, budget), _freeze((own, options), budget)]
    if None in kept:
        return None
    return (*kept, *(_freeze(value, budget) for value in _class_values(type(optimizer))))


def numbers_of(optimizer: Optimizer) -> dict[str, Any]:
    """Returns the attributes of an optimizer that are numbers or names."""
    return {
        name: value
        for name, value in vars(optimizer).items()
        if isinstance(value, _NUMBERS) and name not in _KNOWN
    }


def _class_values(kind: type) -> Iterator[Any]:
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


def _freeze(value: Any, budget: list[int]) -> Any:
    """Returns a plain value as an immutable one; ``None`` if it is not plain."""
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
    items = tuple(_freeze(item, budget) for item in value)
    return None if None in items else items
