"""What an optimizer keeps besides parameters and state, in a form that can be compared."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch.optim import Optimizer

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
