"""Steps of optimizers that are not torch's, made by several clones over some parameters each.

With ``optimizer_state="sharded"`` a replica steps a clone over the parameters that it owns. That
equals one step over all parameters if a step changes only these things:

    a step changes                          clones
    parameters and their state              each clone has its own parameters
    numbers of a group or an attribute,     each clone has copies; all clones must write the same
    tensors of a group
    anything else: lists, globals, other    no clones: one step over all parameters
    tensors, the storage of a parameter,
    random numbers

No list can name all classes, so a class is measured: it steps small parameters, all by one
optimizer and each by one of its own, with its own options. Both must have the same bits, in the
first steps and in late ones, for which the numbers that count the steps are increased. Code that
uses global objects is not measured, because the measurement would change these. A change in a
later step, which the measurement has not shown, raises ``StrategyError`` after that step.
"""

from __future__ import annotations

import copy
import inspect
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from functools import cache, partial
from logging import Logger
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, NoReturn, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mirror.comm.workers.worker_group import LocalWorkerGroup
from mirror.devices import using
from mirror.errors import StrategyError
from mirror.execution.replicas import Replicas
from mirror.execution.run import current
from mirror.replica.optimizers.optimizer_traits import (
    describe,
    extra_state_of,
    is_torchs_own,
    numbers_of,
    raw_step,
    rebuild,
)
from mirror.replica.optimizers.param_groups import StepOnce, all_step_hooks, keep_options

_SIDES = ((6, 4, 3, 2, 2, 2), (5, 4, 3, 2, 2, 2))  # of the parameters of a measurement
_NUM_STEPS = 3  # the first ones, and as many after each of:
_LATE_STEPS = (100, 10_000, 1_000_000)
_GRADIENT_SCALES = (1.0, 1e4)  # a bound of the norm over all parameters may need large gradients
_MAX_REASONS = 64
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_MUTABLE = (list, dict, set, bytearray, deque, Tensor)
_HARMLESS = (type, ModuleType, BuiltinFunctionType, Logger, Enum, TypeVar, partial)
_reasons: dict[Any, str | None] = {}  # by class and options


def explain_not_per_param(optimizer: Optimizer) -> str | None:
    """Returns why clones over some parameters each do not equal one optimizer; else ``None``."""
    if isinstance(optimizer, torch.optim.LBFGS):
        return "it has one history for all parameters together"
    kind: type = type(optimizer)
    if _has_arguments(kind):
        return "its step has other arguments than a closure"
    if extra_state_of(optimizer, with_numbers=False) is None:
        return "it has attributes or options that are neither numbers nor names"
    name = _find_global(kind)
    if name is not None:
        return f"it uses the global object {name!r}"
    dims = tuple(tuple({p.dim(): None for p in g["params"]}) for g in optimizer.param_groups)
    kept = extra_state_of(optimizer)
    if kept is None:  # it has tensors among its options
        return _measure(optimizer, dims)
    key = (kind, dims, kept)
    if key not in _reasons:
        if len(_reasons) >= _MAX_REASONS:
            _reasons.clear()
        _reasons[key] = _measure(optimizer, dims)
    return _reasons[key]


def calls_hooks_again(optimizer: Optimizer) -> bool:
    """Whether each clone's step would call the hooks of a step, as its base class's step does."""
    bases = type(optimizer).__mro__[1:-2]
    return any(all_step_hooks(optimizer)) and any(map(is_torchs_own, bases))


def step_clones(
    optimizer: Optimizer,
    clones: Sequence[Optimizer],
    replicas: Replicas,
    closure_result: Any,
    *,
    has_closure: bool,
) -> None:
    """Steps each clone on its device, and keeps what they have written into their groups.

    Of several workers, also what the clones of the others have written: a worker may have none.

    Raises:
        StrategyError: the steps have changed more than parameters, state and equal options.
    """
    kept = extra_state_of(optimizer, with_numbers=False)
    used = [clone for clone in clones if any(group["params"] for group in clone.param_groups)]
    for clone, device in zip(clones, replicas.devices, strict=True):
        if clone not in used:
            continue
        storages = _storages(clone)
        with using(device):
            args = (StepOnce(closure_result),) if has_closure else ()
            result = step_alone(clone, *args)
        if result is not closure_result:
            _refuse(optimizer, "has returned a value of its own")
        if _storages(clone) != storages:
            _refuse(optimizer, "has replaced the storage of a parameter")
        if extra_state_of(clone, with_numbers=False) != kept:
            _refuse(optimizer, "has changed lists, globals or other attributes")
        if _has_other_state(clone):
            _refuse(optimizer, "has made state that is not of a parameter")
    left = [
        (numbers_of(clone), [g if g["params"] else {} for g in clone.param_groups])
        for clone in used
    ]
    if replicas.workers.is_multi_process:
        left = _exchange_left(optimizer, replicas.workers, left)
    for numbers, _ in left[1:]:
        name = _find_difference(left[0][0], numbers)
        if name is not None:
            _refuse(optimizer, f"has set its attribute {name!r} differently on two devices")
    vars(optimizer).update(left[0][0] if left else {})
    for i, options in enumerate(optimizer.param_groups):
        written = [groups[i] for _, groups in left if groups[i]]
        for other in written[1:]:
            name = _find_difference(written[0], other)
            if name is not None:
                _refuse(optimizer, f"has set {name!r} of group {i} differently on two devices")
        if written:
            _keep(options, written[0], is_first=written[0] is clones[0].param_groups[i])


_Left: TypeAlias = tuple[dict[str, Any], list[dict[str, Any]]]  # a clone's attributes and groups


def _exchange_left(
    optimizer: Optimizer, workers: LocalWorkerGroup, own: list[_Left]
) -> list[_Left]:
    """Returns what the clones of all workers have left, without parameters for other workers'."""
    sent = [
        (numbers, [{n: v for n, v in group.items() if n != "params"} for group in groups])
        for numbers, groups in own
    ]
    what = f"what a step of {type(optimizer).__name__} has left"
    every = workers.exchange_values(what, sent, lambda tensor, device: tensor)
    every[workers.rank] = own
    return [one for theirs in every for one in theirs]


def step_alone(optimizer: Optimizer, *args: Any) -> Any:
    """Makes a step of a clone: no hooks, and the steps of its base classes are those of torch."""
    before = current.stepping
    try:
        current.stepping = (*before, optimizer)
        return raw_step(type(optimizer).step)(optimizer, *args)
    finally:
        current.stepping = before


def _refuse(optimizer: Optimizer, what: str) -> NoReturn:
    raise StrategyError(
        f"{type(optimizer).__name__} {what}, which its first steps of small parameters have not "
        'shown; with optimizer_state="sharded" each device steps only the parameters that it '
        'owns, so this step is not that of one device; use optimizer_state="replicated"'
    )


# Measuring


@cache
def _has_arguments(kind: type) -> bool:
    step = raw_step(kind.step)  # type: ignore[attr-defined]
    _, *parameters = inspect.signature(step).parameters.values()
    return any(one.name != "closure" and one.kind not in _VARIADIC for one in parameters)


@cache
def _find_global(kind: type) -> str | None:
    """Returns the name of a global object, or a class's, that code of a class uses.

    The code of the functions that it calls is searched, too.
    """
    own = [item for cls in _classes(kind) for item in vars(cls).items()]
    for name, value in own:
        if isinstance(value, _MUTABLE) and not name.startswith("__"):
            return name
    codes = [getattr(value, "__func__", value) for _, value in own]
    functions = [inspect.unwrap(code) for code in codes if isinstance(code, FunctionType)]
    seen: set[FunctionType] = set()
    while functions:
        function: Any = functions.pop()
        if function in seen:
            continue
        seen.add(function)
        for name in _names_in(function.__code__):
            value = function.__globals__.get(name)
            if isinstance(value, FunctionType):
                if not value.__module__.startswith("torch."):
                    functions.append(inspect.unwrap(value))
            elif isinstance(value, _MUTABLE) or getattr(value, "__dict__", None):
                if not isinstance(value, _HARMLESS) and type(value).__module__ != "typing":
                    return name
    return None


def _classes(kind: type) -> list[type]:
    """Returns the classes of which an optimizer is made that are not torch's."""
    return [c for c in kind.__mro__ if not f"{c.__module__}.".startswith(("torch.", "builtins."))]


@contextmanager
def _restoring_classes(kind: type) -> Iterator[None]:
    """Restores the attributes of an optimizer's classes afterwards: a measurement may count."""
    before = [(cls, dict(vars(cls))) for cls in _classes(kind)]
    try:
        yield
    finally:
        for cls, known in before:
            for name in [name for name, value in vars(cls).items() if name not in known]:
                delattr(cls, name)
            for name, value in known.items():
                if vars(cls)[name] is not value:
                    setattr(cls, name, value)


def _names_in(code: CodeType) -> set[str]:
    inner = [one for one in code.co_consts if isinstance(one, CodeType)]
    return {*code.co_names}.union(*map(_names_in, inner))


@torch.inference_mode(False)
@torch.enable_grad()
def _measure(optimizer: Optimizer, dims: Sequence[Sequence[int]]) -> str | None:
    state = torch.get_rng_state()
    try:
        with _restoring_classes(type(optimizer)):
            return _compare_groups(describe(optimizer, lambda parameter: 0), dims)
    finally:
        torch.set_rng_state(state)


def _compare_groups(description: Mapping[str, Any], dims: Sequence[Sequence[int]]) -> str | None:
    for options, dims_of_group in zip(description["groups"], dims, strict=True):
        if options.get("lr") == 0:  # as in a warm-up; it would hide what an update depends on
            options["lr"] = 0.1
        shapes = [sides[:dim] for dim in dims_of_group for sides in _SIDES]
        for scale in _GRADIENT_SCALES if shapes else ():
            try:
                reason = _compare({**description, "groups": [options]}, shapes, scale)
            except Exception as error:
                if scale != 1.0:  # too large for it
                    continue
                return (
                    "a step of small parameters without a closure raises "
                    f"{type(error).__name__}: {error}"
                )
            if reason is not None:
                return reason
    return None


def _compare(
    description: Mapping[str, Any], shapes: Sequence[tuple[int, ...]], scale: float
) -> str | None:
    """Returns how steps of one optimizer and steps of one for each parameter differ."""
    generator = torch.Generator().manual_seed(1)

    def draw() -> list[Tensor]:
        return [torch.randn(shape, generator=generator, device="cpu") for shape in shapes]

    num_steps = _NUM_STEPS * (1 + len(_LATE_STEPS))
    values, gradients = draw(), [[grad * scale for grad in draw()] for _ in range(num_steps)]
    results = []
    indices = range(len(shapes))
    for members in ([[*indices]], [[i] for i in indices]):
        parameters = [nn.Parameter(value.clone()) for value in values]
        optimizers = [_rebuild_one(description, own, parameters) for own in members]
        state = torch.get_rng_state()
        count = 0  # as the optimizers count
        for i, of_step in enumerate(gradients):
            if i and i % _NUM_STEPS == 0:
                late = _LATE_STEPS[i // _NUM_STEPS - 1]
                for one in optimizers:
                    _set_counters(one, count, late)
                count = late
            count += 1
            for parameter, grad in zip(parameters, of_step, strict=True):
                parameter.grad = grad.clone()
            for one in optimizers:
                storages, kept = _storages(one), extra_state_of(one, with_numbers=False)
                result = step_alone(one)
                if result is not None:
                    return "its step returns a value of its own"
                if _storages(one) != storages:
                    return "its step replaces the storage of a parameter"
                if extra_state_of(one, with_numbers=False) != kept:
                    return "its step changes lists, globals or other attributes"
        if not torch.equal(torch.get_rng_state(), state):
            return "its step draws random numbers"
        if any(map(_has_other_state, optimizers)):
            return "it has state that is not of a parameter"
        for one in optimizers[1:]:
            for mine, theirs in zip(optimizers[0].param_groups, one.param_groups, strict=True):
                if _find_difference(mine, theirs) is not None:
                    return "its options depend on all parameters"
            if _find_difference(numbers_of(optimizers[0]), numbers_of(one)) is not None:
                return "its attributes depend on all parameters"
        results.append(parameters)
    same = (
        torch.allclose(a, b, rtol=0.0, atol=0.0, equal_nan=True)
        for a, b in zip(*results, strict=True)
    )
    return None if all(same) else "its update of a parameter depends on other parameters"


def _set_counters(optimizer: Optimizer, count: int, late: int) -> None:
    """Sets the numbers that count steps, which a step may compare with a limit, to a late one."""
    for holder in (*optimizer.param_groups, *optimizer.state.values(), vars(optimizer)):
        for name, value in holder.items() if isinstance(holder, dict) else ():
            if isinstance(value, Tensor) and value.dim() == 0 and value.item() == count:
                holder[name] = torch.full_like(value, late)
            elif type(value) in (int, float) and value == count:
                holder[name] = type(value)(late)


def _rebuild_one(
    description: Mapping[str, Any], members: Sequence[int], parameters: Sequence[nn.Parameter]
) -> Optimizer:
    own, groups = copy.deepcopy((description["own"], description["groups"]))
    own_one = {**description, "own": own, "groups": groups, "members": [members]}
    return rebuild(own_one, lambda index: [parameters[index]])


# What steps have changed


def _storages(optimizer: Optimizer) -> list[int]:
    return [p.data_ptr() for group in optimizer.param_groups for p in group["params"]]


def _has_other_state(optimizer: Optimizer) -> bool:
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return any(id(key) not in known for key in optimizer.state)


def _find_difference(some: Mapping[str, Any], others: Mapping[str, Any]) -> str | None:
    """Returns the name of an option in which two copies of a group differ."""
    for name in some.keys() | others.keys():
        mine, theirs = _value(some.get(name)), _value(others.get(name))
        are_plain = isinstance(mine, _PLAIN) and isinstance(theirs, _PLAIN)
        if are_plain and mine != theirs and not (mine != mine and theirs != theirs):
            return name
    return None


_PLAIN = (type(None), bool, int, float, complex, str, tuple, list)


def _value(option: Any) -> Any:
    if isinstance(option, Tensor):
        return ("a tensor", option.tolist())
    return None if isinstance(option, list) else option  # the lists of parameters differ


def _keep(options: dict[str, Any], written: dict[str, Any], *, is_first: bool) -> None:
    """Copies what a clone has written into its copy of a group into the group."""
    if is_first:
        keep_options([options], [written])
        return
    for name, value in written.items():
        known = options.get(name)
        if isinstance(value, Tensor) and isinstance(known, Tensor):
            with torch.no_grad():
                known.copy_(value)
        elif name != "params":
            options[name] = value
