"""TraceGuards: facts that a trace takes for granted, compared before every call in microseconds.

[Note: Assumptions]
A program is right as long as the step's Python code would do the same as in the trace. The values
that this depends on are compared before every call, as a few lists in the interpreter's C:

    thread      grad mode, autocast, default dtype; the process's flags of cuDNN, cuBLAS, attention
    modules     of those called: modes, numbers and strings among attributes, submodules, hooks
    parameters  their identity, memory and strides, whether they require gradients
    optimizers  groups: their parameters and options, but for learning rates and options that
                have changed before, which are inputs
    names       values of globals, closure cells, defaults and ``self`` of the step, and of the
                user's functions that it names: see ``FreeVariables``
    arguments   sizes, dtypes, plain values: see ``StepProgram.fits``

Other changes (a file, an entry of a container of thousands) are not detected: pass such values
as arguments.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mirror.base.torch_private import (
    MODULE_HOOKS,
    hooks_of,
    hooks_of_all_modules,
    kernel_flags,
    num_function_modes,
)
from mirror.compiler.capture.traced_numbers import TracedNumbers
from mirror.compiler.capture.traced_swap import TracedSwap
from mirror.compiler.free_variables import PLAIN, FreeVariables, SameObject, make_comparable
from mirror.compiler.step_inputs import StateTensor
from mirror.replica.optimizers.param_groups import step_hooks

_SCALER = [
    *["enabled, growth_factor, backoff_factor or growth_interval of a GradScaler"] * 4,
    *["the tensors of a GradScaler"] * 2,
]


_call = operator.methodcaller("__call__")


class GuardedValue:
    """One list of values to compare.

    Args:
        names: the description of each value.
        read: returns the values of now.
        is_untouched: whether the places hold the objects of the trace, found in C; if it returns
            False, the values are read and compared.
    """

    __slots__ = ("_is_untouched", "_names", "_read", "_then")

    def __init__(
        self,
        names: Sequence[str],
        read: Callable[[], list[Any]],
        is_untouched: Callable[[], bool] | None = None,
    ) -> None:
        self._names, self._read, self._is_untouched = names, read, is_untouched
        self._then = read()

    def holds(self) -> bool:
        """Whether all values are those of the trace."""
        if self._is_untouched is None:
            return self._read() == self._then
        return self._is_untouched() or _are_exact(self._read(), self._then)

    def find_change(self) -> str | None:
        """Returns the first change in words; ``None`` if there is none."""
        now = self._read()
        if _are_exact(now, self._then):
            return None
        for i, (before, after) in enumerate(zip(self._then, now, strict=False)):
            if not _are_exact([before], [after]) and i < len(self._names):
                return (
                    f"{self._names[i]} was {_format_value(before)} and is {_format_value(after)}"
                )
        return f"{self._names[0] if self._names else 'something'} or a value beside it"


def _are_exact(now: Sequence[Any], then: Sequence[Any]) -> bool:
    """Whether values are equal, and of the same types: 2 * x and 2.0 * x have other dtypes."""
    return now == then and all(map(_is_exact, now, then))


def _is_exact(now: Any, then: Any) -> bool:
    if isinstance(now, (list, tuple)):
        return all(map(_is_exact, now, then))
    return type(now) is type(then) and (type(now) is not float or repr(now) == repr(then))


def _format_value(value: Any) -> str:
    if isinstance(value, SameObject):
        return "one object" if value.is_then else "another one"
    return f"{value!r:.80}"


class _NamedValue(Sequence[str]):
    """Descriptions of values of parameters; paths are searched for only when one is used.

    Args:
        what: the kind of value.
    """

    def __init__(self, what: str, places: Sequence[StateTensor]) -> None:
        self._what, self._places = what, places

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, i: Any) -> Any:
        return f"{self._what} of {self._places[i].name!r}"


class TraceGuards:
    """The guards of a trace. See [Note: Assumptions]."""

    def __init__(self, watched: Sequence[GuardedValue]) -> None:
        self._watched = list(watched)

    def hold(self) -> bool:
        """Whether all values are those of the trace."""
        for watched in self._watched:  # noqa: SIM110  that would be a call for each
            if not watched.holds():
                return False
        return True

    def find_change(self) -> str | None:
        """Returns the first change in words; ``None`` if there is none."""
        return next(filter(None, (watched.find_change() for watched in self._watched)), None)


def guard_step(
    step: Callable[..., Any],
    modules: Sequence[nn.Module],
    places: Sequence[StateTensor],
    swaps: Sequence[TracedSwap],
    stepped_apart: Sequence[Optimizer],
    rates_read: Sequence[Optimizer],
    numbers: TracedNumbers,
    scalers: Sequence[Any] = (),
) -> TraceGuards:
    """Returns the guards of a traced step.

    Args:
        step: the user's function.
        modules: the modules that it has called.
        places: the parameters that it uses.
        swaps: the optimizers that it steps.
        stepped_apart: the optimizers that step between programs.
        rates_read: the optimizers with learning rates that it has read as numbers.
        numbers: the options that are inputs, which may change.
        scalers: the gradient scalers that it uses.
    """
    layers = {id(sub): sub for module in modules for sub in module.modules()}
    around = FreeVariables([step], layers.values())
    return TraceGuards(
        [
            *guard_code(modules, around),
            *_guard_parameters(places),
            *[_guard_optimizer(swap, numbers) for swap in swaps],
            *[_guard_groups(optimizer) for optimizer in stepped_apart],
            *[_guard_rates(optimizer) for optimizer in rates_read],
            *[GuardedValue(_SCALER, scaler.traced_settings) for scaler in scalers],
        ]
    )


def guard_code(modules: Sequence[nn.Module], around: FreeVariables) -> list[GuardedValue]:
    """Guards what decides which code of modules runs, and what it reads.

    Args:
        modules: the modules that are called.
        around: the values that the code finds by their names.
    """
    return [
        _guard_thread(),
        *_guard_modules(modules),
        GuardedValue(around.names, around.scan, around.watch()),
    ]


def _guard_thread() -> GuardedValue:
    """Guards the modes of torch in this thread, and the flags by which it chooses kernels."""
    flags, getters = kernel_flags()
    kinds = ["cpu", *(["cuda"] if torch.accelerator.is_available() else [])]

    def read() -> list[Any]:
        return [
            torch.is_grad_enabled(),
            torch.get_default_dtype(),
            torch.get_default_device() if num_function_modes() else None,
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            *map(_call, getters),
            *[
                torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
                for kind in kinds
            ],
        ]

    names = [
        "the grad mode",
        "the default dtype",
        "the default device",
        "deterministic algorithms",
        "warn_only",
        *flags,
    ]
    return GuardedValue([*names, *[f"autocast of {kind}" for kind in kinds]], read)


def _guard_modules(called: Sequence[nn.Module]) -> list[GuardedValue]:
    modules = {id(sub): sub for module in called for sub in module.modules()}
    paths: dict[int, str] = {}
    for module in called:
        for name, sub in module.named_modules():
            paths.setdefault(id(sub), name or type(sub).__name__)
    getters: list[tuple[Callable[[Any], Any], dict[str, Any]]] = []
    of_values: list[str] = []
    children: list[Any] = []
    owners: list[str] = []
    counted: list[dict[str, Any]] = []  # one may get more entries
    hooks = hooks_of_all_modules()
    held: list[tuple[dict[str, Any], str]] = []
    for key, module in modules.items():
        attributes = module.__dict__
        if "training" not in attributes:  # of torch.compile: it has those of its module
            continue
        names = [
            name
            for name, value in attributes.items()
            if isinstance(value, PLAIN) and not name.startswith(("_is_", "_compiled", "_version"))
        ]
        # With two names it gives a tuple; every module has the first, some have no mode.
        getters.append((operator.itemgetter("_is_full_backward_hook", *names), attributes))
        of_values.append(f"one of {', '.join(names)} of module {paths[key]!r}")
        if module._modules:
            children.append(module._modules)
            owners.append(f"the submodules of {paths[key]!r}")
        hooks += [attributes[name] for name in MODULE_HOOKS]
        if module._parameters:
            children.append(module._parameters)
            owners.append(f"the parameters of {paths[key]!r}")
        buffers = attributes["_buffers"]  # some may be None
        held += [(buffers, name) for name in buffers]
        held += [(attributes, name) for name, one in attributes.items() if isinstance(one, Tensor)]
        counted += [attributes, module._modules, module._parameters, buffers]

    def read() -> list[Any]:
        ids = [[*map(id, dict.values(entries))] for entries in children]
        try:
            values = [get(attributes) for get, attributes in getters]
            return [*values, *ids, [*map(len, counted)]]
        except KeyError as error:
            return [error.args[0]]

    then = [get(attributes) for get, attributes in getters]
    objects = [*chain.from_iterable([*then, *map(dict.values, children)])]
    sizes = [*map(len, counted)]

    def are_untouched() -> bool:
        if [*map(len, counted)] != sizes:
            return False
        try:
            now = [get(attributes) for get, attributes in getters]
        except KeyError:
            return False
        held = chain.from_iterable([*now, *map(dict.values, children)])
        return all(map(operator.is_, held, objects))

    def read_tensors() -> list[Any]:
        return [SameObject(dict.get(kept, name)) for kept, name in held]  # no replica's copy

    def read_hooks() -> list[Any]:
        return [*map(tuple, hooks)]  # ids of handles: one in another's place is another

    tensors = [f"tensor {n!r}" for _, n in held]
    have_none = None if any(hooks) else lambda: not any(hooks)
    return [
        GuardedValue([*of_values, *owners, "an attribute of a module"], read, are_untouched),
        GuardedValue(["the hooks of modules"] * len(hooks), read_hooks, have_none),
        *([GuardedValue(tensors, read_tensors, _watch(held))] if held else []),
    ]


def _watch(places: Sequence[tuple[dict[str, Any], str]]) -> Callable[[], bool]:
    """Returns a function: whether the dicts have the values of now under these names."""
    dicts, names = [kept for kept, _ in places], [name for _, name in places]
    then = [*map(dict.get, dicts, names)]
    return lambda: all(map(operator.is_, map(dict.get, dicts, names), then))


def _guard_parameters(places: Sequence[StateTensor]) -> list[GuardedValue]:
    tensors = [p.owner if p.record is None else p.record.targets[0] for p in places]
    pointer, strides = Tensor.data_ptr, Tensor.stride  # three times as fast as methodcaller
    requires_grad = operator.attrgetter("requires_grad")
    mirrored = [p.record.hooks for p in places if p.record is not None]
    own = [p.owner for p in places if p.record is None]

    def have_no_hooks() -> bool:
        return not (any(mirrored) or any(map(hooks_of, own)))

    return [
        GuardedValue(
            _NamedValue("the hooks", sorted(places, key=lambda place: place.record is None)),
            lambda: [
                *map(tuple, mirrored),
                *[tuple(hooks or ()) for hooks in map(hooks_of, own)],
            ],
            have_no_hooks if have_no_hooks() else None,
        ),
        GuardedValue(_NamedValue("requires_grad", places), lambda: [*map(requires_grad, tensors)]),
        GuardedValue(_NamedValue("the memory", places), lambda: [*map(pointer, tensors)]),
        GuardedValue(_NamedValue("the strides", places), lambda: [*map(strides, tensors)]),
    ]


def guard_layouts(places: Sequence[StateTensor]) -> GuardedValue:
    """Guards dtypes, sizes and strides of state, and which of it requires gradients."""
    strides, layout = Tensor.stride, operator.attrgetter("requires_grad", "dtype", "shape")

    def read() -> list[Any]:
        tensors = [
            p.owner
            if p.record is None
            else (p.record.targets if p.is_parameter else p.record.copies)[0]
            for p in places
        ]
        return [*map(layout, tensors), *map(strides, tensors)]

    return GuardedValue(_NamedValue("the layout", [*places, *places]), read)


def _guard_optimizer(swap: TracedSwap, numbers: TracedNumbers) -> GuardedValue:
    optimizer = swap.optimizer
    kind = type(optimizer).__name__
    inputs = {(s.group, s.name) for s in numbers.sources if s.optimizer is optimizer}
    groups = optimizer.param_groups
    watched = [
        [n for n in group if n not in ("params", "lr", "initial_lr") and (i, n) not in inputs]
        for i, group in enumerate(groups)
    ]

    def read() -> list[Any]:
        now = optimizer.param_groups
        found: list[Any] = [len(now), [*map(tuple, step_hooks(optimizer))]]
        for group, names in zip(now, watched, strict=False):
            found.append([*map(id, group["params"])])
            found += [len(group), *[make_comparable(group.get(name)) for name in names]]
        return found

    said = [f"the number of parameter groups of {kind}", f"the hooks of {kind}"]
    for names in watched:
        said += [f"a parameter group of {kind}", f"the number of options of {kind}"]
        said += [f"option {name!r} of {kind}" for name in names]
    return GuardedValue(said, read)


def _guard_groups(optimizer: Optimizer) -> GuardedValue:
    """Guards the parameters of an optimizer that steps between programs."""

    def read() -> list[Any]:
        return [[*map(id, group["params"])] for group in optimizer.param_groups]

    return GuardedValue([f"a parameter group of {type(optimizer).__name__}"], read)


def _guard_rates(optimizer: Optimizer) -> GuardedValue:
    """Guards learning rates that a step has read as numbers."""

    def read() -> list[Any]:
        return [make_comparable(group.get("lr")) for group in optimizer.param_groups]

    name = f"a learning rate of {type(optimizer).__name__}, which the step reads as a number,"
    return GuardedValue([name] * 8, read)
