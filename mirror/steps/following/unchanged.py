"""Unchanged: what a step does in Python is done at the trace alone; so it must leave nothing.

[Note: Side effects]
A trace runs the step's Python code once; the programs never. What that code changes outside the
graph is put back, also when the trace fails, and refused if calls would be missing it:

    an attribute of a module        refused, unless the step leaves it as it was, or torch itself
                                    keeps a tensor there, as ``weight_norm`` does
    train(), eval()                 kept: every call leaves the modes that the step leaves
    a group of an optimizer         refused: schedulers step outside
    an optimizer's state            tensors are; a number that is counted is refused
    group["lr"], read in the step   a constant: another rate is another trace
    a tensor kept around the step   refused: in a list, a dict, a variable, a field
    a number around the step        warned of if the step only changes it, as a count of traces;
                                    refused if it uses it besides, as in ``if count % 4``
    numpy's, Python's generators    refused if they have drawn
    a file, anything else           cannot be seen; docs/compiled-steps.md says so
"""

from __future__ import annotations

import dis
import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import CodeType, MethodType
from typing import Any

from torch import nn
from torch.optim import Optimizer

from mirror.errors import CompileError
from mirror.execution.current import current
from mirror.execution.replicas import Replicas
from mirror.replica.optimizer.optimizers import optimizers_of
from mirror.steps.following.attributes import SetAttributes
from mirror.steps.following.effects import SideEffects
from mirror.steps.following.options import OptionGuards

logger = logging.getLogger(__name__)

_warned_steps: set[CodeType] = set()


class UnchangedSurroundings:
    """Notes what a step changes in modules and optimizers, and puts it back.

    Args:
        step: the user's function.
        tracer: who follows it.
    """

    def __init__(self, step: Callable[..., Any], tracer: Any, replicas: Replicas) -> None:
        self._step = step

        def is_traced() -> bool:
            return current.replica is not None and current.replica.tracing is tracer

        self._attributes = SetAttributes(is_traced)
        optimizers = _optimizers(step, replicas)
        self._options = OptionGuards(optimizers)
        self._tracer, self._effects = tracer, SideEffects(step, optimizers)
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
        """The modules whose modes the step changes, and to what."""
        return self._attributes.modes

    @property
    def buffers(self) -> dict[int, Any]:
        """By ``id`` of an only replica's buffer, what the step has put in its place."""
        return self._attributes.buffers

    @property
    def rates_read(self) -> list[Optimizer]:
        """The optimizers whose learning rates the step has read as numbers."""
        return self._options.read


def _optimizers(step: Callable[..., Any], replicas: Replicas) -> list[Optimizer]:
    """Returns the optimizers that a step may look at, as far as can be known before it does."""
    found = optimizers_of(replicas).optimizers()
    for value in _around(step):
        if isinstance(value, Optimizer):
            found.append(value)
    return list({id(optimizer): optimizer for optimizer in found}.values())


def _around(step: Callable[..., Any]) -> Iterator[Any]:
    """Yields what a function finds around itself."""
    owner = step.__self__ if isinstance(step, MethodType) else step
    yield from vars(owner).values() if hasattr(owner, "__dict__") else ()
    function = inspect.unwrap(getattr(step, "__func__", step))
    if inspect.isfunction(function):
        around = inspect.getclosurevars(function)
        yield from (*around.nonlocals.values(), *around.globals.values())


def _warn_of_names(step: Callable[..., Any]) -> None:
    """Says once which names around it a step sets."""
    code = getattr(getattr(step, "__func__", step), "__code__", None)
    if not isinstance(code, CodeType) or code in _warned_steps:
        return
    names = sorted(_set_by(code, ()))
    if names:
        _warned_steps.add(code)
        logger.warning(
            "the step %s sets %s, which a compiled step does when it is traced and never again; "
            "set it of what the step returns",
            getattr(step, "__qualname__", code.co_name),
            ", ".join(map(repr, names)),
        )


def _set_by(code: CodeType, own: tuple[str, ...]) -> set[str]:
    """Returns the names of globals and variables around that a function sets."""
    own = (*own, *code.co_cellvars)
    names = {
        i.argval
        for i in dis.get_instructions(code)
        if i.opname == "STORE_GLOBAL" or (i.opname == "STORE_DEREF" and i.argval not in own)
    }
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _set_by(constant, own)
    return names
