"""The objects of a checkpoint: their kinds, how their states are taken, checked and restored.

Between runs the global random generators are the whole state of the replicas' random numbers: see
``mirror/execution/swapped_state.py``. Replica 0 continues with the
generator of the CPU. The numbers of any other replica follow from that state and its index. So
training continues bit for bit with the same number of replicas. With another number, the old
replicas draw what they would have drawn, and new ones get generators of their own. The generator
of each GPU is saved, too; a GPU that is missing in the checkpoint keeps its state.
"""

from __future__ import annotations

import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from mirror.data.rng_state import capture_rng, restore_rng
from mirror.devices import cuda_devices_in_use, generator_state, random_state, set_random_state
from mirror.errors import CheckpointError, short_repr

MODULE, OPTIMIZER, SCHEDULER = "module", "optimizer", "scheduler"
STATEFUL, GENERATOR, VALUE = "stateful", "generator", "value"

PLACED = {STATEFUL, VALUE}
"""Tensors of these kinds return to their device; others are copied."""
_GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
_MAPPINGS = (dict, OrderedDict, Counter, defaultdict)


def kind_of(name: str, obj: object) -> str:
    """Returns the kind of an object.

    Raises:
        CheckpointError: it is a class, or only half of what saves and restores itself.
    """
    if isinstance(obj, nn.Module):
        return MODULE
    if isinstance(obj, Optimizer):
        return OPTIMIZER
    if isinstance(obj, LRScheduler):
        return SCHEDULER
    if isinstance(obj, _GENERATORS):
        return GENERATOR
    has = [callable(getattr(obj, method, None)) for method in ("state_dict", "load_state_dict")]
    if isinstance(obj, type) or has[0] != has[1]:
        raise CheckpointError(
            "a checkpoint takes objects with state_dict() and load_state_dict(), and plain "
            f"values; {name!r} is {short_repr(obj)}"
            + ("" if isinstance(obj, type) else ", which has only one of the two")
        )
    return STATEFUL if all(has) else VALUE


def state_of(name: str, kind: str, obj: Any) -> Any:
    """Returns the state of an object, which may share its memory.

    Raises:
        CheckpointError: it has parameters without a shape.
    """
    if kind == GENERATOR:
        return _generator_state(obj)
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


def _generator_state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator_state(generator)
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.bit_generator.state


def capture_global_rng() -> dict[str, Any]:
    """Returns the states of torch's, Python's and numpy's global generators."""
    cuda = {str(device): random_state(device) for device in cuda_devices_in_use()}
    return {**capture_rng(), "cuda": cuda}


def restore_global_rng(state: Mapping[str, Any]) -> None:
    """Restores the global generators.

    Raises:
        Exception: of many types; the state is malformed, and some generators may have changed.
    """
    restore_rng(state)
    for device in cuda_devices_in_use():
        if str(device) in state["cuda"]:
            set_random_state(device, state["cuda"][str(device)])


def check_state(name: str, kind: str, obj: Any, saved_type: str, state: Any) -> None:
    """Raises CheckpointError if an object is known to be unable to take a state."""
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


def restore_state(kind: str, obj: Any, state: Any) -> None:
    """Restores the state of an object; raises any error of its class."""
    if kind != GENERATOR:
        obj.load_state_dict(state)
    elif isinstance(obj, random.Random):
        obj.setstate(state)
    elif isinstance(obj, np.random.Generator):
        obj.bit_generator.state = state
    else:
        obj.set_state(state)


def restore_value(obj: Any, value: Any) -> Any:
    """Returns a restored plain value: the old object if it could be changed in place.

    Containers are changed in place, and arrays and tensors of the same shape and dtype.
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
            f"the checkpoint has no {missing!r} of {name!r}; it has {_list_some(state)}; restore "
            "it into the module that it was saved from"
        )
    for unexpected in state.keys() - own.keys():
        raise CheckpointError(
            f"{name!r} has no {unexpected!r}, which is in the checkpoint; it has "
            f"{_list_some(own)}; restore it into the module that it was saved from"
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
    except Exception as error:  # a state of any form
        raise CheckpointError(
            f"the state of {name!r} is not that of an optimizer: {error!r}"
        ) from error
    if sizes != saved:
        raise CheckpointError(
            f"the groups of {name!r} have {sizes} parameters; in the checkpoint they have "
            f"{saved}; restore it into the optimizer that it was saved from"
        )
    if unknown:
        raise CheckpointError(f"the state of {name!r} has unknown parameters: {unknown}")


def _group_sizes(groups: Any) -> list[int]:
    return [len(group["params"]) for group in groups]


def _list_some(names: Mapping[str, Any]) -> str:
    found = [repr(name) for name in names]
    return ", ".join(found[:5]) + (", ..." if len(found) > 5 else "") or "nothing"
