"""Side effects of a step while it is traced: they are undone, or refused.

[Note: Side effects]
A trace runs the step's Python code once; the programs never do. Changes outside of the graph are
undone, also if the trace fails, and raise CompileError if later calls would lack them:

    attribute of a module            refused, unless the step restores it, or torch itself keeps
                                     a tensor there, as ``weight_norm`` does; in a call of a
                                     module refused, since code outside may read it
    train(), eval()                  kept: every call leaves the same modes
    parameter group of an optimizer  refused: schedulers step outside
    state of an optimizer            tensors are written; a number that is counted is refused
    group["lr"], read in the step    a constant: another rate causes a retrace
    tensor stored outside the step   refused: in a list, a dict, a variable, an attribute
    number outside the step          a warning if the step only changes it, such as a count of
                                     traces; refused if it also uses it, as in ``if count % 4``
    NumPy's, Python's generators     refused if they have drawn
    files and the rest               not detected; docs/compiled-steps.md says so
"""

from __future__ import annotations

import dis
import inspect
import linecache
import logging
import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import CodeType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mirror.base.bitwise import are_equal
from mirror.base.torch_private import MODULE_HOOKS, wrapping
from mirror.compiler.capture.traced_swap import OptionGuards, raw_state
from mirror.compiler.free_variables import PLAIN, FreeVariables
from mirror.compiler.step_errors import current_line, is_torchs
from mirror.compiler.torch_internals import is_fake
from mirror.errors import CompileError
from mirror.execution.replicas import Replicas
from mirror.replica.modules.module_owner import ReplicaDict, WatchedDict
from mirror.replica.optimizers.optimizer_registry import optimizers_of
from mirror.values import are_identical

_MISSING: Any = object()
_PLAIN = (bool, int, float, str, bytes, complex, type(None))
_TRACERS = os.path.join(os.path.dirname(torch.fx.__file__), "")  # make_fx sets attributes, too
_HELD = ("_parameters", "_buffers", "_modules")


@dataclass(eq=False, slots=True)
class _Change:
    """The change of one attribute.

    Attributes:
        before: the value in the module's ``__dict__``.
        now: the value that was set last.
        line: the user's line that set it.
        is_torchs: whether code of torch has set it, as a parametrization does.
    """

    module: nn.Module
    name: str
    before: Any
    now: Any
    line: str
    is_torchs: bool


class SetAttributes:
    """Records attributes of modules that are set or deleted.

    Modules that the step itself creates, such as a loss function, are left out.

    Args:
        is_traced: whether the current thread traces the step.
        is_strict: whether torch's own code must not keep tensors there, either.

    Attributes:
        modes: the modules that get another mode in the step, with that mode.
        buffers: by ``id`` of a buffer of a single replica, the tensor that replaces it.
    """

    def __init__(self, is_traced: Callable[[], bool], *, is_strict: bool) -> None:
        self._is_traced, self._is_strict = is_traced, is_strict
        self._changes: dict[tuple[int, str], _Change] = {}
        self._made: dict[int, nn.Module] = {}
        self.modes: list[tuple[nn.Module, bool]] = []
        self.buffers: dict[int, Any] = {}
        self._replaced: dict[tuple[int, str], tuple[Any, Any]] = {}  # their dicts, and before

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Records within the block; afterwards the modules have their former attributes."""

        def wrap_init(init: Callable[..., None]) -> Callable[..., None]:
            def record_init(module: nn.Module, *args: Any, **kwargs: Any) -> None:
                if self._is_traced():
                    self._made[id(module)] = module
                init(module, *args, **kwargs)

            return record_init

        def wrap_change(change: Callable[..., None]) -> Callable[..., None]:
            def record_change(module: nn.Module, name: str, *value: Any) -> None:
                if self._is_traced():
                    now = value[0] if value else _MISSING
                    self._record(module, name, now, sys._getframe(1).f_code.co_filename)
                change(module, name, *value)

            return record_change

        try:
            with (
                wrapping(nn.Module, "__init__", wrap_init),
                wrapping(nn.Module, "__setattr__", wrap_change),
                wrapping(nn.Module, "__delattr__", wrap_change),
            ):
                yield
        finally:
            self._put_back()
            self._made.clear()

    def _record(self, module: nn.Module, name: str, value: Any, path: str) -> None:
        if path.startswith(_TRACERS):
            return
        if id(module) in self._made and not isinstance(value, nn.Parameter):
            return
        if any(name in module.__dict__.get(kind, ()) for kind in _HELD):
            self._note_held(module, name, value)
            return
        if isinstance(value, (nn.Parameter, nn.Module)):
            raise _refusal(f"attribute {name!r} of {type(module).__name__} is created in the step")
        known = self._changes.get((id(module), name))
        if known is None:
            before = module.__dict__.get(name, _MISSING)
            known = _Change(module, name, before, value, "", False)
            self._changes[id(module), name] = known
        known.now, known.line, known.is_torchs = value, current_line(), is_torchs(path)

    def _note_held(self, module: nn.Module, name: str, value: Any) -> None:
        buffers = module.__dict__["_buffers"]
        if name in buffers and isinstance(buffers, ReplicaDict):
            return  # a mirrored one: see Placeholders.assigned
        if buffers.get(name) is not None and isinstance(buffers, WatchedDict):
            if isinstance(value, Tensor):
                _, before = self._replaced.setdefault(
                    (id(buffers), name), (buffers, buffers[name])
                )
                if (value.shape, value.dtype) != (before.shape, before.dtype):
                    what = f"{name!r} of {type(module).__name__}"
                    raise _refusal(f"{what} is replaced by a tensor of another shape or dtype")
                self.buffers[id(before)] = value
                return
        known = next(d[name] for d in map(module.__dict__.get, _HELD) if d and name in d)
        if value is not known:
            raise _refusal(f"{name!r} of {type(module).__name__} is replaced")

    def _put_back(self) -> None:
        for (_, name), (buffers, before) in self._replaced.items():
            dict.__setitem__(buffers, name, before)
        for change in self._changes.values():
            if change.before is _MISSING:
                change.module.__dict__.pop(change.name, None)
            else:
                change.module.__dict__[change.name] = change.before

    def check(self) -> None:
        """Collects the modes.

        Raises:
            CompileError: the step changes an attribute.
        """
        for change in self._changes.values():
            if _are_alike(change.before, change.now):
                continue
            if change.name == "training":
                self.modes.append((change.module, bool(change.now)))
            elif self._is_strict or not change.is_torchs or isinstance(change.now, _PLAIN):
                raise _refusal(
                    f"attribute {change.name!r} of {type(change.module).__name__} is set to "
                    "something else than it was",
                    change.line,
                )


def _are_alike(before: Any, now: Any) -> bool:
    if before is now:
        return True
    return type(before) is type(now) and isinstance(now, _PLAIN) and bool(before == now)


def _refusal(what: str, line: str = "") -> CompileError:
    return CompileError(
        f"the step cannot be compiled: {line or current_line()}: {what}, which a compiled step "
        "would do once and never again; return it from the step, keep tensors in buffers, or pass "
        "fallback='eager'"
    )


logger = logging.getLogger(__name__)

_ADDING = {"append", "appendleft", "extend", "add", "update", "setdefault", "insert"}
# Other operations in a line that changes a value by itself.
_USES = (
    "CALL",
    "PRECALL",
    "COMPARE",
    "POP_JUMP",
    "JUMP_IF",
    "RETURN",
    "CONTAINS",
    "FORMAT",
    "IS_",
)
_ONCE = "which a compiled step would do once and never again"
_REMEDY = "return it from the step, keep it in a buffer, or pass fallback='eager'"
_warned: set[tuple[CodeType, str]] = set()


class SideEffects:
    """Finds changes outside of a step, and undoes them if the step is not compiled.

    Args:
        step: the user's function; ``None`` if it is not asked for kept tensors.
        optimizers: the optimizers that it may read.
        around: the values that it must not change at all; by default those that its names find,
            which it may change if it does not use them.
    """

    def __init__(
        self,
        step: Callable[..., Any] | None,
        optimizers: Sequence[Optimizer] = (),
        around: FreeVariables | None = None,
    ) -> None:
        self._step = step
        self._states = [
            (optimizer, {id(entry): (entry, dict(entry)) for entry in _entries(optimizer)})
            for optimizer in optimizers
        ]
        self._is_strict = around is not None
        self._around = FreeVariables([step]) if around is None else around
        self._before = [(entry, entry.value()) for entry in self._around.entries]
        self._contents = [(name, one, _copy(one)) for name, one in self._around.sizes]
        values = [value for _, value in self._before]
        self._generators = [(one, _state(one)) for one in (*values, random, np.random)]

    def put_back(self) -> None:
        """Undoes all changes of the step."""
        for _, container, content in self._contents:
            if _has_changed(container, content):
                container.clear()
                container.extend(content) if isinstance(container, list) else container.update(
                    content
                )
        for entry, value in self._before:
            if entry.value() is not value:
                entry.put(value)
        for optimizer, entries in self._states:
            for held in _entries(optimizer):
                before = entries.get(id(held), (held, {}))[1]
                if any(isinstance(value, is_fake) for value in held.values()):
                    held.clear()
                    held.update(before)

    def check(self, modules: Sequence[nn.Module]) -> None:
        """Compares the surroundings with those before the step.

        Args:
            modules: the modules that it has called.

        Raises:
            CompileError: later calls would lack a change.
        """
        codes = [code for one in self._around.codes for code in _walk_code(one)]
        for generator, state in self._generators:
            if state is not None and not are_equal(state, _state(generator)):
                raise CompileError(
                    f"the step cannot be compiled: {line_about(codes, _names_of(generator))}: it "
                    "draws from Python's or numpy's random numbers, which would be the same in "
                    "every call; draw with torch.rand, or pass fallback='eager'"
                )
        self._refuse_kept_tensors(codes, modules)
        for entry, before in self._before:
            after = entry.value()
            if isinstance(after, PLAIN) and not are_equal(before, after):
                self._report_change(codes, entry.name, entry.read_as, is_added=False)
        for name, container, content in self._contents:
            if _has_changed(container, content):
                self._report_change(
                    codes, name, self._around.read_as[id(container)], is_added=True
                )

    def _refuse_kept_tensors(
        self, codes: Sequence[CodeType], modules: Sequence[nn.Module]
    ) -> None:
        layers = list({id(sub): sub for module in modules for sub in module.modules()}.values())
        hooks = [
            hook
            for layer in layers
            for name in MODULE_HOOKS
            for hook in vars(layer).get(name, {}).values()
        ]
        for optimizer, _ in self._states:
            for held in _entries(optimizer):
                for key, value in held.items():
                    if isinstance(value, is_fake):
                        kind = type(optimizer).__name__
                        raise CompileError(
                            f"the step cannot be compiled: {line_about(codes, [key])}: it keeps "
                            f"a tensor in {key!r} of the state of {kind}, outside of its step(), "
                            f"{_ONCE}; keep it in a variable of the step, or pass fallback='eager'"
                        )
        around = FreeVariables([self._step, *hooks], layers)
        own = [c for code in around.codes for c in _walk_code(code)] or list(codes)
        for entry in around.entries:
            if isinstance(entry.value(), is_fake):
                raise CompileError(
                    f"the step cannot be compiled: {line_about(own, [entry.read_as])}: it keeps "
                    f"a tensor outside of itself ({entry.name}), {_ONCE}; {_REMEDY}"
                )

    def _report_change(
        self, codes: Sequence[CodeType], name: str, key: Any, *, is_added: bool
    ) -> None:
        for code in codes:
            line = _line_that_reads(code, key, is_added=is_added)
            if line is not None:
                raise CompileError(
                    f"the step cannot be compiled: {_quote_line(code, line)}: it uses what it "
                    f"changes itself ({name}), {_ONCE}; count outside of the step and pass the "
                    "value as an argument, or pass fallback='eager'"
                )
        if self._is_strict:
            raise CompileError(
                f"the step cannot be compiled: {line_about(codes, [key])}: it changes {name}, "
                f"{_ONCE}; {_REMEDY}"
            )
        code = codes[0] if codes else SideEffects.check.__code__
        if (code, name) not in _warned:
            _warned.add((code, name))
            logger.warning(
                "the step %s changes %s, which a compiled step does when it is traced and never "
                "again; change it by what the step returns",
                getattr(self._step, "__qualname__", type(self._step).__qualname__),
                name,
            )


def _entries(optimizer: Optimizer) -> list[dict[Any, Any]]:
    """Returns an optimizer's entry of state for each parameter."""
    return [entry for entry in raw_state(optimizer.state).values() if isinstance(entry, dict)]


def _copy(container: Any) -> Any:
    if isinstance(container, (list, set)):
        return list(container)
    return dict(container)


def _has_changed(container: Any, content: Any) -> bool:
    """Whether a container has gained or lost entries since its copy was made."""
    if isinstance(container, set):
        return not are_identical(list(container), content)
    return len(container) != len(content)


def _state(generator: Any) -> Any:
    """Returns the state of a generator of Python or NumPy; ``None`` for another object."""
    if isinstance(generator, random.Random) or generator is random:
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return repr(generator.bit_generator.state)
    if isinstance(generator, np.random.RandomState) or generator is np.random:
        found: Any = generator.get_state(legacy=False)
        return (found["state"]["pos"], found["state"]["key"].tobytes(), found["has_gauss"])
    return None


def _names_of(generator: Any) -> list[str]:
    if generator is random:
        return ["random", "randint", "choice", "uniform", "shuffle", "sample", "gauss"]
    if generator is np.random:
        return ["random"]
    return []


def _walk_code(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _walk_code(constant)


def _group_by_line(code: CodeType) -> dict[int, list[dis.Instruction]]:
    lines: dict[int, list[dis.Instruction]] = {}
    starts = dict(dis.findlinestarts(code))
    line: int | None = None
    for instruction in dis.get_instructions(code):
        line = starts.get(instruction.offset, line)
        if line is not None:
            lines.setdefault(line, []).append(instruction)
    return lines


def _line_that_reads(code: CodeType, key: Any, *, is_added: bool) -> int | None:
    """Returns a line that uses a value, instead of only changing it by itself."""
    for line, instructions in _group_by_line(code).items():
        if not any(_loads(one, key) for one in instructions):
            continue
        names = [one.opname for one in instructions]
        if is_added and any(one.argval in _ADDING for one in instructions):
            continue
        stores = any(
            one.opname.startswith("STORE_") and (one.argval == key or one.opname == "STORE_SUBSCR")
            for one in instructions
        )
        if not stores or any(name.startswith(_USES) for name in names):
            return line
    return None


def _loads(instruction: dis.Instruction, key: Any) -> bool:
    name = instruction.opname
    return name.startswith("LOAD_") and name != "LOAD_CLOSURE" and instruction.argval == key


def line_about(codes: Sequence[CodeType], keys: Sequence[Any]) -> str:
    """Returns a line that stores under one of these names, or else a line that has one."""
    for kinds in (("STORE_",), ("LOAD_", "STORE_")):
        for code in codes:
            for line, instructions in _group_by_line(code).items():
                has = any(
                    one.argval in keys and one.opname.startswith((*kinds, "LOAD_CONST"))
                    for one in instructions
                )
                if has and any(one.opname.startswith(kinds) for one in instructions):
                    return _quote_line(code, line)
    return _quote_line(codes[0], codes[0].co_firstlineno) if codes else "the step"


def _quote_line(code: CodeType, line: int) -> str:
    text = linecache.getline(code.co_filename, line).strip()
    return f"{code.co_filename}:{line}" + (f" `{text}`" if text else "")


_warned_steps: set[CodeType] = set()


class UnchangedSurroundings:
    """Records the changes of a step in modules and optimizers, and undoes them.

    Args:
        step: the user's function.
        tracer: the tracer of the step.
        around: see ``SideEffects``.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        tracer: Any,
        replicas: Replicas,
        around: FreeVariables | None = None,
    ) -> None:
        self._step = step
        self._attributes = SetAttributes(tracer.is_followed, is_strict=around is not None)
        optimizers = _optimizers(step, replicas)
        self._options = OptionGuards(optimizers, tracer.numbers.option)
        self._tracer, self._effects = tracer, SideEffects(step, optimizers, around)
        self._stack = ExitStack()

    def __enter__(self) -> None:
        self._stack.enter_context(self._attributes.recording())
        self._stack.enter_context(self._options.recording())

    def __exit__(self, kind: Any, *exception: Any) -> None:
        self._stack.close()
        try:
            if kind is None:
                self._attributes.check()
                self._options.check()
                self._effects.check(list(self._tracer.modules.values()))
        except CompileError:
            self._effects.put_back()
            raise
        if kind is None:
            _warn_of_names(self._step)
        else:
            self._effects.put_back()

    @property
    def modes(self) -> list[tuple[nn.Module, bool]]:
        """The modules that get another mode in the step, with that mode."""
        return self._attributes.modes

    @property
    def buffers(self) -> dict[int, Any]:
        """By ``id`` of a buffer of a single replica, the tensor that replaces it."""
        return self._attributes.buffers

    @property
    def rates_read(self) -> list[Optimizer]:
        """The optimizers with learning rates that the step has read as numbers."""
        return self._options.read


def _optimizers(step: Callable[..., Any], replicas: Replicas) -> list[Optimizer]:
    """Returns the optimizers that a step may use, as far as its names show."""
    found = optimizers_of(replicas).optimizers()
    for value in _read_surroundings(step):
        if isinstance(value, Optimizer):
            found.append(value)
    return list({id(optimizer): optimizer for optimizer in found}.values())


def _read_surroundings(step: Callable[..., Any]) -> Iterator[Any]:
    """Yields the values of a function's attributes, closure and globals."""
    owner = step.__self__ if isinstance(step, MethodType) else step
    yield from vars(owner).values() if hasattr(owner, "__dict__") else ()
    function = inspect.unwrap(getattr(step, "__func__", step))
    if inspect.isfunction(function):
        around = inspect.getclosurevars(function)
        yield from (*around.nonlocals.values(), *around.globals.values())


def _warn_of_names(step: Callable[..., Any]) -> None:
    """Warns once of the outer names that a step sets."""
    code = getattr(getattr(step, "__func__", step), "__code__", None)
    if not isinstance(code, CodeType) or code in _warned_steps:
        return
    names = sorted(_find_set_names(code, ()))
    if names:
        _warned_steps.add(code)
        logger.warning(
            "the step %s sets %s, which a compiled step does when it is traced and never again; "
            "set it of what the step returns",
            getattr(step, "__qualname__", code.co_name),
            ", ".join(map(repr, names)),
        )


def _find_set_names(code: CodeType, own: tuple[str, ...]) -> set[str]:
    """Returns the names of globals and variables around that a function sets."""
    own = (*own, *code.co_cellvars)
    names = {
        i.argval
        for i in dis.get_instructions(code)
        if i.opname == "STORE_GLOBAL" or (i.opname == "STORE_DEREF" and i.argval not in own)
    }
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _find_set_names(constant, own)
    return names
