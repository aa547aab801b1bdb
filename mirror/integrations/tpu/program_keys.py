"""What a program takes for granted, as far as it can be compared: the key that it is kept by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from mirror.integrations.tpu.tpu_arguments import TpuArguments, is_static
from mirror.integrations.tpu.tpu_optimizers import flags_of
from mirror.server.recorded_model import Model


def tpu_program_key(
    fn: Callable[..., Any], arguments: TpuArguments, model: Model, optimizers: Sequence[Optimizer]
) -> Any:
    """Returns what differs where a step has to be traced anew.

    Of the step's closure and globals, and of the attributes of modules, these are the numbers,
    strings and flags, and lists and tuples of them.
    """
    of_modules = [
        [(k, v) for k, v in vars(module).items() if is_static(v) and not k.startswith("_")]
        for module in model.modules
    ]
    return (
        fn,
        arguments.key,
        repr(_seen_by(fn)),
        repr(of_modules),
        tuple(model.identity()),
        tuple(model.flags()),
        tuple((id(o), flags_of(o), _members(o)) for o in optimizers),
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
    )


def _seen_by(fn: Callable[..., Any]) -> list[tuple[str, Any]]:
    """Returns the plain values that a function finds outside of itself, by name."""
    inner: Any = getattr(fn, "__func__", fn)
    code = getattr(inner, "__code__", None)
    if code is None:
        return []
    seen = {name: inner.__globals__[name] for name in code.co_names if name in inner.__globals__}
    for name, cell in zip(code.co_freevars, inner.__closure__ or (), strict=True):
        try:
            seen[name] = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    return sorted((name, value) for name, value in seen.items() if is_static(value))


def _members(optimizer: Optimizer) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(map(id, group["params"])) for group in optimizer.param_groups)
