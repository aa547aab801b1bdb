"""Copies what a trial of a call may change, and restores the rest: see [Note: Trials]."""

from __future__ import annotations

import array
import copy
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mirror.base.bitwise import have_equal_numbers
from mirror.base.containers import (
    IMMUTABLE,
    assign,
    contents_of,
    empty_like,
    is_consumed,
    is_leaf,
    is_object,
    is_shared,
)
from mirror.base.torch_private import (
    FORWARD_HOOKS,
    read_parametrize_cache,
    write_parametrize_cache,
)
from mirror.device.device_mesh import DeviceMesh
from mirror.devices import random_state, set_random_state
from mirror.execution.run import Run, Unverifiable
from mirror.replica.modules.module_owner import interceptor_of
from mirror.replica.modules.per_replica_values import PerReplicaAttribute
from mirror.replica.params.mirrored_buffer import MirroredBuffer, ReplicatedBuffer
from mirror.replica.params.mirrored_tensor import MirroredTensor
from mirror.replica.params.replicated_param import ReplicatedParam
from mirror.replica.params.torch_function import MirroredParameter
from mirror.values import PerReplica, rebuild_node

_TORCHS = frozenset(nn.Module().__dict__)
_TABLES = {name for name in _TORCHS if isinstance(nn.Module().__dict__[name], dict)}
_CPU = torch.device("cpu")
_BUILT_IN = frozenset((list, tuple, set, dict))
# Implemented in C, and changed by their methods, but copied by ``copy.deepcopy`` like data.
_COPIED = (
    *(random.Random, np.random.Generator, np.random.RandomState, np.random.BitGenerator),
    *(bytearray, array.array),
)


@contextmanager
def telling_what_fails() -> Iterator[None]:
    """Turns errors inside into Unverifiable: forward has not caused them."""
    try:
        yield
    except (Unverifiable, torch.OutOfMemoryError):
        raise
    except Exception as error:
        name, text = type(error).__name__, str(error)[:300]
        raise Unverifiable(f"its state cannot be copied, {name}: {text}") from None


class Copies:
    """Copies values that forward could change; what is one object stays one.

    Args:
        mesh: copies of tensors are on the first replica's devices; by default where they were.
    """

    def __init__(self, mesh: DeviceMesh | None = None) -> None:
        self._mesh = mesh
        self._known: dict[int, tuple[Any, Any]] = {}
        self._is_in_data = False  # all that an object of data holds is data

    def copy(self, value: Any) -> Any:
        """Returns a copy of everything mutable in a value.

        Raises:
            Unverifiable: the value holds an iterator, or values of other replicas.
        """
        if type(value) in IMMUTABLE or isinstance(value, MirroredTensor):
            return value
        if id(value) not in self._known:
            made = self._copy(value)
            self._known[id(value)] = value, made
        return self._known[id(value)][1]

    def _copy(self, value: Any) -> Any:
        if isinstance(value, PerReplica):
            raise Unverifiable("a value is a PerReplica, which has no part for the whole batch")
        if is_consumed(value):
            raise Unverifiable(f"a {type(value).__name__} would be consumed twice")
        if isinstance(value, Tensor):
            return self._copy_tensor(value)
        if isinstance(value, np.ndarray):
            return value.copy()
        if isinstance(value, _COPIED):
            return copy.deepcopy(value)
        if type(value) in _BUILT_IN:  # tables may hold a million numbers
            entries = value.values() if type(value) is dict else value
            if IMMUTABLE.issuperset(map(type, entries)):
                return copy.copy(value)
        if isinstance(value, torch.Generator):
            return value.clone_state()
        if is_leaf(value) or (not self._is_in_data and is_shared(value)):
            return value
        is_outermost = not self._is_in_data and is_object(value) and not is_dataclass(value)
        try:
            self._is_in_data |= is_outermost
            return self._copy_contents(value)
        finally:
            self._is_in_data &= not is_outermost

    def _copy_contents(self, value: Any) -> Any:
        if isinstance(value, tuple):
            return rebuild_node(value, {k: self.copy(v) for k, v in contents_of(value).items()})
        made = empty_like(value)
        self._known[id(value)] = value, made  # before its contents, since it may hold itself
        return assign(made, {key: self.copy(child) for key, child in contents_of(value).items()})

    def _copy_tensor(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, nn.Parameter) or tensor.is_meta:
            return tensor
        device = tensor.device if self._mesh is None else self._mesh.peers_of(tensor.device)[0]
        made = tensor.detach().to(device, copy=True)
        made.requires_grad_(tensor.requires_grad)
        self._known[id(tensor)] = tensor, made  # before its attributes, which may hold it
        made.__dict__.update({k: self.copy(v) for k, v in tensor.__dict__.items()})
        return made


@contextmanager
def copying_attributes(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Gives modules copies of their attributes, inside; none of the replicas' own."""
    copies, before = Copies(), list[tuple[dict[str, Any], dict[str, Any]]]()
    own = list[tuple[dict[str, PerReplicaAttribute], dict[str, Any]]]()
    tables = list[tuple[dict[Any, Any], dict[Any, Any]]]()
    try:
        for module in modules:
            attributes: dict[str, PerReplicaAttribute] = getattr(interceptor_of(module), "own", {})
            own.append((attributes, {name: one.suspend() for name, one in attributes.items()}))
            before.append((module.__dict__, dict(module.__dict__)))
            # Hooks and submodules that forward adds, at its first call say.
            for name in module.__dict__.keys() & _TABLES:
                tables.append((module.__dict__[name], dict(module.__dict__[name])))
            for name, value in before[-1][1].items():
                if name not in _TORCHS and not isinstance(value, (nn.Module, nn.Parameter)):
                    module.__dict__[name] = copies.copy(value)
        yield
    finally:
        for held, values in (*before, *tables):
            for name in held.keys() - values.keys():
                del held[name]
            held.update(values)
        for attributes, states in own:
            for name in attributes.keys() - states.keys():
                del attributes[name]
            for name, state in states.items():
                attributes[name].resume(state)


def remove_hooks(modules: Iterable[nn.Module]) -> bool:
    """Removes the forward hooks that are not torch's; returns whether there were any.

    ``copying_attributes`` restores them.
    """
    has_found = False
    for module in modules:
        for name in FORWARD_HOOKS:
            hooks = module.__dict__.get(name, {})  # a ScriptModule has none
            for key, hook in list(hooks.items()):
                kind = hook if isinstance(hook, FunctionType) else type(hook)
                if not kind.__module__.startswith("torch."):
                    del hooks[key]
                    has_found = True
    return has_found


@contextmanager
def copying_buffers(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Gives the first replica copies of its buffers, inside."""
    before = list[tuple[ReplicatedBuffer, Any]]()
    try:
        for module in modules:
            # Plain tensors that are attributes are mirrored like buffers.
            own = module.__dict__
            for buffer in (*own.get("_buffers", {}).values(), *own.values()):
                if isinstance(buffer, MirroredBuffer):
                    before.append((buffer._mirrored, buffer._mirrored.lend_copy(0)))
        yield
    finally:
        for record, state in reversed(before):  # a buffer may be in two modules
            record.give_back(0, state)


@contextmanager
def keeping_parameters(
    modules: Iterable[nn.Module], run: Run, written: set[ReplicatedParam]
) -> Iterator[None]:
    """Restores parameters that the first replica writes inside, and adds them to ``written``.

    What is written through ``p.data`` has no new version, but the run has recorded it.
    """
    variables = {
        parameter._mirrored
        for module in modules
        for parameter in module.__dict__.get("_parameters", {}).values()
        if isinstance(parameter, MirroredParameter)
    }
    before = [(v, v.copies[0]._version, v.copies[0].shape) for v in variables]
    try:
        yield
    finally:
        for variable, version, shape in before:
            now = variable.copies[0]
            is_changed = now._version != version or now.shape != shape
            if not is_changed and variable in run.assigned:
                is_changed = not have_equal_numbers(now.detach(), variable.copies[1].detach())
            if is_changed:
                written.add(variable)
                with torch.no_grad():
                    variable.broadcast(1, [0])


@contextmanager
def keeping_generators(device: torch.device) -> Iterator[tuple[Any, ...]]:
    """Restores the states of the global random generators; yields these."""
    states = generator_states(device)
    try:
        yield states
    finally:
        for place, state in states[0].items():
            set_random_state(place, torch.frombuffer(bytearray(state), dtype=torch.uint8))
        random.setstate(states[1])
        np.random.set_state(states[2])


def generator_states(device: torch.device) -> tuple[Any, ...]:
    """Returns the states of the generators of torch, Python and NumPy, which can be compared."""
    places = dict.fromkeys((_CPU, device))
    of_torch = {place: random_state(place).numpy().tobytes() for place in places}
    kind, keys, *rest = np.random.get_state(legacy=True)
    return of_torch, random.getstate(), (kind, tuple(keys), *rest)


@contextmanager
def without_caches() -> Iterator[None]:
    """Keeps autocast and ``parametrize.cached`` from caching values without a graph."""
    casts, parametrized = torch.is_autocast_cache_enabled(), read_parametrize_cache()
    torch.set_autocast_cache_enabled(False)
    write_parametrize_cache((0, {}))
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(casts)
        write_parametrize_cache(parametrized)
