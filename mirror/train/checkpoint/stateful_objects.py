"""The objects of a checkpoint: what each has to save, what it can be given, and giving it."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from mirror.errors import CheckpointError, short_repr
from mirror.train.checkpoint import generator_state

MODULE, OPTIMIZER, SCHEDULER = "module", "optimizer", "scheduler"
STATEFUL, GENERATOR, VALUE = "stateful", "generator", "value"

_PLACED = {STATEFUL, VALUE}
_MAPPINGS = (dict, OrderedDict, Counter, defaultdict)


def kind_of(name: str, obj: object) -> str:
    """Returns what an object is to a checkpoint.

    Raises:
        CheckpointError: it is a class, or only half of what saves and restores itself.
    """
    if isinstance(obj, nn.Module):
        return MODULE
    if isinstance(obj, Optimizer):
        return OPTIMIZER
    if isinstance(obj, LRScheduler):
        return SCHEDULER
    if generator_state.is_generator(obj):
        return GENERATOR
    has = [callable(getattr(obj, method, None)) for method in ("state_dict", "load_state_dict")]
    if isinstance(obj, type) or has[0] != has[1]:
        raise CheckpointError(
            "a checkpoint takes objects with state_dict() and load_state_dict(), and plain "
            f"values; {name!r} is {short_repr(obj)}"
            + ("" if isinstance(obj, type) else ", which has only one of the two")
        )
    return STATEFUL if all(has) else VALUE


def keeps_device(kind: str) -> bool:
    """Whether the tensors of a state go back to their device; others are copied where they go."""
    return kind in _PLACED


def state_of(name: str, kind: str, obj: Any) -> Any:
    """Returns the state of an object, which may share its memory.

    Raises:
        CheckpointError: it has parameters without a shape.
    """
    if kind == GENERATOR:
        return generator_state.take(obj)
    if kind == VALUE:
        return obj
    if kind == MODULE:
        for path, tensor in (*obj.named_parameters(), *obj.named_buffers()):
            if is_lazy(tensor):
                raise CheckpointError(
                    f"parameter {path!r} of {name!r} has no shape yet; call the module once "
                    "before it is saved or restored"
                )
    return obj.state_dict()


def check(name: str, kind: str, obj: Any, saved_type: str, state: Any) -> None:
    """Raises CheckpointError unless an object can take a state, as far as that can be told."""
    own_type = type(obj).__name__
    if kind in (OPTIMIZER, SCHEDULER) and own_type != saved_type:
        raise CheckpointError(
            f"{name!r} must be restored into what it was saved from; that was a {saved_type}, "
            f"this is a {own_type}"
        )
    if kind == MODULE:
        _check_module(name, obj.state_dict(), state)
    elif kind == OPTIMIZER:
        _check_optimizer(name, obj.state_dict(), state)


def give(kind: str, obj: Any, state: Any) -> None:
    """Gives an object its state; it may raise whatever its class raises."""
    if kind == GENERATOR:
        generator_state.give(obj, state)
    else:
        obj.load_state_dict(state)


def give_value(obj: Any, value: Any) -> Any:
    """Writes a plain value into the one that the user holds, where that can be; returns it.

    A container, array or tensor of the same type, shape and dtype is changed in place.
    """
    if type(obj) is not type(value):
        return value
    if type(obj) in _MAPPINGS or type(obj) is set:
        obj.clear()
        obj.update(value)
    elif type(obj) in (list, deque):
        obj.clear()
        obj.extend(value)
    elif isinstance(obj, np.ndarray):
        if (obj.shape, obj.dtype) != (value.shape, value.dtype) or not obj.flags.writeable:
            return value
        obj[...] = value
    elif isinstance(obj, Tensor):
        if (obj.shape, obj.dtype, obj.layout) != (value.shape, value.dtype, value.layout):
            return value
        with torch.no_grad():
            obj.copy_(value)
    else:
        return value
    return obj


def _check_module(name: str, own: Mapping[str, Any], state: Any) -> None:
    if not isinstance(state, Mapping):
        raise CheckpointError(f"the state of {name!r}, a module, is {short_repr(state)}")
    for missing in own.keys() - state.keys():
        raise CheckpointError(
            f"the checkpoint has no {missing!r} of {name!r}; it has {_some(state)}; restore it "
            "into the module that it was saved from"
        )
    for unexpected in state.keys() - own.keys():
        raise CheckpointError(
            f"{name!r} has no {unexpected!r}, which is in the checkpoint; it has {_some(own)}; "
            "restore it into the module that it was saved from"
        )
    for key, value in own.items():
        saved = state[key]
        if isinstance(value, Tensor) and (
            not isinstance(saved, Tensor)
            or (saved.shape, saved.dtype) != (value.shape, value.dtype)
        ):
            raise CheckpointError(
                f"{key!r} of {name!r} is {short_repr(value)}; in the checkpoint it is "
                f"{short_repr(saved)}; restore it into the module that it was saved from"
            )


def _check_optimizer(name: str, own: Mapping[str, Any], state: Any) -> None:
    if not isinstance(state, Mapping) or not {"state", "param_groups"} <= state.keys():
        raise CheckpointError(f"the state of {name!r}, an optimizer, is {short_repr(state)}")
    sizes = _group_sizes(own["param_groups"])
    try:
        saved = _group_sizes(state["param_groups"])
        unknown = state["state"].keys() - range(sum(saved))
    except Exception as error:  # whatever looking into something unknown raises
        raise CheckpointError(
            f"the state of {name!r} is none of an optimizer: {error!r}"
        ) from error
    if sizes != saved:
        raise CheckpointError(
            f"the groups of {name!r} have {sizes} parameters; in the checkpoint they have "
            f"{saved}; restore it into the optimizer that it was saved from"
        )
    if unknown:
        raise CheckpointError(f"the state of {name!r} is of parameters that it has not: {unknown}")


def _group_sizes(groups: Any) -> list[int]:
    return [len(group["params"]) for group in groups]


def _some(names: Mapping[str, Any]) -> str:
    found = [repr(name) for name in names]
    return ", ".join(found[:5]) + (", ..." if len(found) > 5 else "") or "nothing"
