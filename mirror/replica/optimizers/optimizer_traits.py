"""Finds out what the steps of an optimizer class do, from its code and by steps of small tensors.

Three questions decide how an optimizer over mirrored parameters steps:

    question                                  answered by
    does a step change more than parameters   the class: torch's own do not. Of a subclass, the
    and ``state``?                            values that it keeps are compared before and after
                                              the first replica's step: ``extra_state_of``
    does an update of an element depend on    steps of small tensors, once whole and once in
    other elements, or on other parameters?   pieces, which are compared: ``measure_divisible``
    does a class that is not torch's update   the same, in more and later steps, and a search of
    each parameter by itself?                 its code: ``explain_not_per_param``, in its own file

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

[Note: Optimizers over pieces]
A server steps an optimizer over its own pieces of parameters only, and so does a replica with
``optimizer_state="sharded"``. The result is right if the update of an element depends only on that
element's value, gradient and state, as in SGD and Adam. It is wrong for an optimizer that uses
norms of variables (LARS, LAMB), rows and columns (Adafactor, Muon) or all variables together, or
that calls a closure (LBFGS). No list can classify a user's class, so ``check_piecewise`` steps one
optimizer over small whole tensors, and others of the same class and options over their pieces, and
compares the results. The pieces' optimizers are made by ``rebuild``, from class and options.
"""

from __future__ import annotations

import sys
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from functools import cache, lru_cache
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
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
    return step is not None and has_torchs_step(kind, step)


@lru_cache(maxsize=256)
def has_torchs_step(kind: type, step: Callable[..., Any]) -> bool:
    """As ``is_torchs_own``, given the class's step: without a call in Python in every step."""
    return (
        f"{kind.__module__}.".startswith(_TORCHS)  # that of some is torch.optim itself
        and kind is not Optimizer
        and raw_step(step).__module__.startswith(_TORCHS)
        and not issubclass(kind, torch.optim.LBFGS)
    )


@lru_cache(maxsize=256)
def raw_step(step: Any) -> Callable[..., Any]:
    """Returns a class's step without the wrappers of mirror and of torch's hooks."""
    # Either may have come first, and ``hooked``, torch's mark, is then on the other.
    while is_wrapper(step) or getattr(step, "__code__", None) is hooked_code():
        step = step.__wrapped__
    raw: Callable[..., Any] = step
    return raw


def refuse_wrappers(optimizer: Optimizer) -> None:
    """Raises StrategyError if an object with ``param_groups`` that is no Optimizer steps one."""
    frame: Any = sys._getframe(2)  # the caller of step, past our wrapper
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


# Optimizers over pieces. See [Note: Optimizers over pieces].

# Attributes that ``rebuild`` sets itself, or that every optimizer creates for itself.
_REBUILT = (
    *("state", "param_groups", "defaults", "step", "_mirror", "_mirror_step_hooks"),
    "_init_finished",
)
_CREATED = ("_opt", "_zero_grad", "_warned")
_NUM_STEPS = 3
_SHAPES = ((6, 4), (5, 4))


def describe(optimizer: Optimizer, index_of: Callable[[Tensor], int]) -> dict[str, Any]:
    """Returns a description for ``rebuild``, which has no weights and can be pickled.

    Args:
        index_of: returns the index of a parameter's variable; may raise KeyError.
    """
    own = {
        name: value
        for name, value in vars(optimizer).items()
        if name not in _REBUILT and not name.startswith(_CREATED)
    }
    return {
        "class": type(optimizer),
        "defaults": dict(optimizer.defaults),
        "groups": hyperparameters_of(optimizer),
        "members": [[index_of(p) for p in group["params"]] for group in optimizer.param_groups],
        "own": own,
    }


def hyperparameters_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Returns the hyperparameters of each parameter group."""
    return [
        {name: value for name, value in group.items() if name not in ("params", "param_names")}
        for group in optimizer.param_groups
    ]


def set_options(optimizer: Optimizer, options: Sequence[Mapping[str, Any]]) -> None:
    """Sets the hyperparameters of each parameter group."""
    for group, values in zip(optimizer.param_groups, options, strict=True):
        group.update(values)


def rebuild(
    description: Mapping[str, Any], parameters: Callable[[int], Sequence[nn.Parameter]]
) -> Optimizer:
    """Returns an optimizer with the class, options and attributes of a description.

    It is created as a copy is, without ``__init__``: the arguments of ``__init__`` are unknown,
    but the attributes that it set are known.

    Args:
        parameters: returns the parameters for the index of a variable.
    """
    optimizer: Optimizer = description["class"].__new__(description["class"])
    groups = [
        {**options, "params": [p for index in members for p in parameters(index)]}
        for options, members in zip(description["groups"], description["members"], strict=True)
    ]
    vars(optimizer).update(description["own"])
    optimizer.__setstate__(
        {"defaults": dict(description["defaults"]), "state": {}, "param_groups": groups}
    )
    optimizer.state = defaultdict(dict)
    return optimizer


def check_piecewise(description: Mapping[str, Any], *, cuts: bool, spreads: bool) -> None:
    """Raises StrategyError for an optimizer that servers cannot step over their pieces.

    Args:
        cuts: whether its variables are cut into pieces.
        spreads: whether its variables are on several servers.
    """
    name = description["class"].__name__
    options = {**description, "members": [[0, 1]], "groups": [dict(description["groups"][0])]}
    generator = torch.Generator().manual_seed(1)

    def draw() -> list[Tensor]:
        return [torch.randn(shape, generator=generator, device="cpu") for shape in _SHAPES]

    values, gradients = draw(), [draw() for _ in range(_NUM_STEPS)]
    state = torch.get_rng_state()
    try:
        whole, is_sparse = _run_steps(options, [[0, 1]], values, gradients, 1)
    except Exception as error:
        raise StrategyError(
            f"{name} cannot be stepped on a parameter server, by `optimizer.step()` with only "
            f"gradients: {type(error).__name__}: {error}; use another optimizer, or "
            "MirroredStrategy"
        ) from error
    finally:
        torch.set_rng_state(state)
    for applies, owners, num_pieces, dependency, remedy in (
        (cuts, [[0, 1]], 2, "the other rows of its variable", "leave out partitioner="),
        (spreads, [[0], [1]], 1, "other variables", "use one server: num_servers=1"),
    ):
        if applies:
            cut, _ = _run_steps(options, owners, values, gradients, num_pieces, is_sparse)
            torch.set_rng_state(state)
            if not all(torch.allclose(a, b, atol=1e-6) for a, b in zip(whole, cut, strict=True)):
                raise StrategyError(
                    f"the update of a row by {name} depends on {dependency}, which may be on "
                    f"another server; {remedy}, or use an optimizer that updates each element "
                    "by itself"
                )


class Divisible(Enum):
    """How small the parts may be that an optimizer steps apart from each other."""

    BY_ELEMENT = "elements"
    BY_PARAMETER = "parameters"
    NOT = "nothing"


_divisible: dict[type, Divisible] = {}
# Options of the check: a rate of 0, as in a warm-up, would hide what an update depends on.
_CHECKED = {"lr": 0.1, "foreach": False, "fused": False, "capturable": False}


def measure_divisible(optimizer: Optimizer) -> Divisible:
    """Returns which parts an optimizer of torch.optim may step apart; measured once per class."""
    kind = type(optimizer)
    found = _divisible.get(kind)
    if found is None:
        description = describe(optimizer, lambda parameter: 0)
        options = description["groups"][0]
        options |= {n: value for n, value in _CHECKED.items() if n in options}
        options["differentiable"] = False
        with torch.inference_mode(False):
            found = _divisible[kind] = _measure(description)
    return found


def _measure(description: Mapping[str, Any]) -> Divisible:
    for cuts, found in ((True, Divisible.BY_ELEMENT), (False, Divisible.BY_PARAMETER)):
        try:
            check_piecewise(description, cuts=cuts, spreads=True)
        except StrategyError:
            continue
        return found
    return Divisible.NOT


def _run_steps(
    description: Mapping[str, Any],
    owners: Sequence[Sequence[int]],
    values: Sequence[Tensor],
    gradients: Sequence[Sequence[Tensor]],
    num_pieces: int,
    is_sparse: bool | None = None,
) -> tuple[list[Tensor], bool]:
    """Returns the values after some steps, and whether the optimizer needs sparse gradients."""
    if is_sparse is None:
        try:
            return _run_steps(description, owners, values, gradients, num_pieces, False)
        except RuntimeError:
            return _run_steps(description, owners, values, gradients, num_pieces, True)
    pieces = [
        [nn.Parameter(piece.clone()) for piece in value.tensor_split(num_pieces)]
        for value in values
    ]
    optimizers = [
        rebuild({**description, "members": [list(own)]}, lambda index: pieces[index])
        for own in owners
    ]
    for step_gradients in gradients:
        for own, gradient in zip(pieces, step_gradients, strict=True):
            for piece, part in zip(own, gradient.tensor_split(num_pieces), strict=True):
                piece.grad = part.to_sparse(1) if is_sparse else part.clone()
        for optimizer in optimizers:
            raw_step(type(optimizer).step)(optimizer)
    return [torch.cat([piece.detach() for piece in own]) for own in pieces], is_sparse
