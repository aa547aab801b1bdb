"""Effects: what a step changes of what is around it as it is traced. See [Note: Side effects]."""

from __future__ import annotations

import dis
import linecache
import logging
import random
from collections.abc import Callable, Iterator, Sequence
from types import CodeType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mirror.errors import CompileError
from mirror.steps.around import FreeVariables
from mirror.steps.comparable import PLAIN
from mirror.steps.following.leases import raw_state
from mirror.steps.torch_internals import MODULE_HOOKS, is_fake

logger = logging.getLogger(__name__)

_ADDING = {"append", "appendleft", "extend", "add", "update", "setdefault", "insert"}
# What a line does besides that changes a value only by itself.
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
    """Sees what has changed around a step, and puts it back where the step is not compiled.

    Args:
        step: the user's function.
        optimizers: those that it may look into.
    """

    def __init__(self, step: Callable[..., Any], optimizers: Sequence[Optimizer] = ()) -> None:
        self._step = step
        self._states = [
            (optimizer, {id(entry): (entry, dict(entry)) for entry in _entries(optimizer)})
            for optimizer in optimizers
        ]
        self._around = FreeVariables([step])
        self._before = [(entry, entry.value()) for entry in self._around.entries]
        self._contents = [(name, one, _copy(one)) for name, one in self._around.sizes]
        values = [value for _, value in self._before]
        self._generators = [(one, _state(one)) for one in (*values, random, np.random)]

    def put_back(self) -> None:
        """Makes all as it was before the step."""
        for _, container, content in self._contents:
            if len(container) != len(content):
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
        """Looks at what the step has left.

        Args:
            modules: those that it has called.

        Raises:
            CompileError: what calls would be missing.
        """
        codes = [code for one in self._around.codes for code in _with_inner(one)]
        for generator, state in self._generators:
            if state is not None and not _are_equal(state, _state(generator)):
                raise CompileError(
                    f"the step cannot be compiled: {_line_about(codes, _names_of(generator))}: it "
                    "draws from Python's or numpy's random numbers, which would be the same in "
                    "every call; draw with torch.rand, or pass fallback='eager'"
                )
        self._refuse_kept_tensors(codes, modules)
        for entry, before in self._before:
            after = entry.value()
            if isinstance(after, PLAIN) and not _are_equal(before, after):
                self._changed(codes, entry.name, entry.read_as, is_added=False)
        for name, container, content in self._contents:
            if len(container) != len(content):
                self._changed(codes, name, self._around.read_as[id(container)], is_added=True)

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
                            f"the step cannot be compiled: {_line_about(codes, [key])}: it keeps "
                            f"a tensor in {key!r} of the state of {kind}, outside of its step(), "
                            f"{_ONCE}; keep it in a variable of the step, or pass fallback='eager'"
                        )
        around = FreeVariables([self._step, *hooks], layers)
        own = [c for code in around.codes for c in _with_inner(code)] or list(codes)
        for entry in around.entries:
            if isinstance(entry.value(), is_fake):
                raise CompileError(
                    f"the step cannot be compiled: {_line_about(own, [entry.read_as])}: it keeps "
                    f"a tensor outside of itself ({entry.name}), {_ONCE}; {_REMEDY}"
                )

    def _changed(self, codes: Sequence[CodeType], name: str, key: Any, *, is_added: bool) -> None:
        for code in codes:
            line = _line_that_reads(code, key, is_added=is_added)
            if line is not None:
                raise CompileError(
                    f"the step cannot be compiled: {_shown(code, line)}: it uses what it changes "
                    f"itself ({name}), {_ONCE}; count outside of the step and pass the value as "
                    "an argument, or pass fallback='eager'"
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
    """Returns what an optimizer holds of each parameter."""
    return [entry for entry in raw_state(optimizer.state).values() if isinstance(entry, dict)]


def _copy(container: Any) -> Any:
    return list(container) if isinstance(container, list) else dict(container)


def _are_equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and bool(torch.equal(a, b))
    return type(a) is type(b) and (a is b or bool(a == b))


def _state(generator: Any) -> Any:
    """Returns the state of what draws random numbers for Python or numpy; ``None``: it is none."""
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


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_inner(constant)


def _by_line(code: CodeType) -> dict[int, list[dis.Instruction]]:
    lines: dict[int, list[dis.Instruction]] = {}
    starts = dict(dis.findlinestarts(code))
    line: int | None = None
    for instruction in dis.get_instructions(code):
        line = starts.get(instruction.offset, line)
        if line is not None:
            lines.setdefault(line, []).append(instruction)
    return lines


def _line_that_reads(code: CodeType, key: Any, *, is_added: bool) -> int | None:
    """Returns a line that does more with a value than to change it by itself."""
    for line, instructions in _by_line(code).items():
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


def _line_about(codes: Sequence[CodeType], keys: Sequence[Any]) -> str:
    """Returns the line that stores something by one of these names, or else that has one."""
    for kinds in (("STORE_",), ("LOAD_", "STORE_")):
        for code in codes:
            for line, instructions in _by_line(code).items():
                has = any(
                    one.argval in keys and one.opname.startswith((*kinds, "LOAD_CONST"))
                    for one in instructions
                )
                if has and any(one.opname.startswith(kinds) for one in instructions):
                    return _shown(code, line)
    return _shown(codes[0], codes[0].co_firstlineno) if codes else "the step"


def _shown(code: CodeType, line: int) -> str:
    text = linecache.getline(code.co_filename, line).strip()
    return f"{code.co_filename}:{line}" + (f" `{text}`" if text else "")
