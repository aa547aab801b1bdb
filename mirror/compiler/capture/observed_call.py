"""ObservedCall: the Python code of one uncompiled call, and what of it no trace may repeat.

A program that stands for a module's call must not freeze what the call reads. The names of the
code that it runs tell: ``FreeVariables`` follows them, and guards compare the values. The code is
found by running it: methods, hooks and closures call each other in ways that no reader of
bytecode sees. Some things have no value to compare: clocks, files, iterators.
"""

from __future__ import annotations

import builtins
import collections
import datetime
import functools
import gc
import importlib
import inspect
import operator
import os
import random
import re
import sys
import threading
import uuid
import warnings
import weakref
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from decimal import Decimal
from fractions import Fraction
from itertools import chain
from pathlib import PurePath
from types import (
    BuiltinFunctionType,
    CodeType,
    FrameType,
    FunctionType,
    GetSetDescriptorType,
    MethodDescriptorType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from mirror.base.torch_private import BACKWARD_HOOKS, WHOLE_CALL
from mirror.compiler.capture.side_effects import line_about
from mirror.compiler.free_variables import MAX_ENTRIES, PLAIN, FreeVariables
from mirror.compiler.step_errors import (
    GENERATED_CODE,
    is_librarys,
    is_mirrors,
    is_torchs,
    is_users,
    quote,
)
from mirror.compiler.torch_internals import is_onednn_on
from mirror.errors import CompileError

_MODULES = {"time", "posix", "nt", "_io", "io", "_random", "_socket", "select", "gc"}
_IMPORTS = "<frozen importlib"
_BUILTINS = {builtins.print, builtins.open, builtins.input}
# What the user's own code must not call; in libraries it is part of what they do.
_DIRECT = {builtins.eval, builtins.exec, builtins.compile, warnings.warn, warnings.warn_explicit}
_READERS = {
    importlib.import_module.__code__: "import_module()",
    inspect.stack.__code__: "inspect.stack()",
    inspect.currentframe.__code__: "inspect.currentframe()",
    Tensor.__repr__.__code__: "str() of a tensor",
}
_ATTENTION = tuple(
    getattr(torch.backends.cuda, f"{kernel}_sdp_enabled")
    for kernel in ("flash", "mem_efficient", "math", "cudnn")
)
_GETTERS = "get_", "_get_", "is_", "_is_", "are_"  # of torch's modes, if they need no argument
_ENVIRON = type(os.environ).__getitem__.__code__
_APPLY: Any = torch.autograd.Function.apply
_BACKWARD = Tensor.register_hook.__code__, _APPLY.__code__
_CALL = getattr(nn.Module, WHOLE_CALL).__code__
_COMPREHENSIONS = {"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"}  # before Python 3.12
_GENERATORS = random.Random, torch.Generator
_CLOCKS = {datetime.datetime, datetime.date}
_OPAQUE = (
    *(bytearray, memoryview, collections.deque),
    *(np.ndarray, np.random.Generator, np.random.RandomState, np.random.BitGenerator),
    *(Optimizer, LRScheduler, threading.local, type(functools.cache(len))),
)
_CONSTANT = (
    *(range, slice, re.Pattern, Decimal, Fraction, uuid.UUID, PurePath, property),
    *(datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo),
    *(type(...), type(NotImplemented), operator.attrgetter, operator.itemgetter),
    *(operator.methodcaller, WrapperDescriptorType, MethodDescriptorType, GetSetDescriptorType),
)


class ObservedCall:
    """Within the block, notes the user's functions that this thread calls.

    Attributes:
        codes: their code, with its globals.
        later: the code among it that runs in the backward pass.
        is_later: whether the calls are those of a backward pass.
        of_libraries: the code of libraries that has run, with its globals.
        modules: by ``id``, the modules that it has called, also those outside of the compiled one.
        impure: a line that reads a clock, a file or the like; empty if there is none.
        getters: the functions without arguments that it asks for a mode of torch.
    """

    def __init__(self) -> None:
        self.codes: dict[CodeType, dict[str, Any]] = {}
        self.later: set[CodeType] = set()
        self.is_later = False
        self.of_libraries: dict[CodeType, dict[str, Any]] = {}
        self.modules = weakref.WeakValueDictionary[int, nn.Module]()
        self.impure = ""
        self.getters: dict[Callable[[], Any], None] = {}
        self._before: Any = None
        self._thread, self._is_collecting = 0, False

    @staticmethod
    def is_possible() -> bool:
        """Whether nothing written in C, as cProfile, has the place of the function that notes."""
        return sys.getprofile() is None or callable(sys.getprofile())

    def __enter__(self) -> None:
        self._before, self._thread = sys.getprofile(), threading.get_ident()
        gc.callbacks.insert(0, self._begin_collection)
        gc.callbacks.append(self._end_collection)
        sys.setprofile(self._note)

    def __exit__(self, *exception: object) -> None:
        sys.setprofile(self._before)
        gc.callbacks.remove(self._begin_collection)
        gc.callbacks.remove(self._end_collection)

    def _begin_collection(self, phase: str, info: dict[str, int]) -> None:
        """Leaves out what the collector calls between any two lines: callbacks and ``__del__``."""
        if phase == "start" and threading.get_ident() == self._thread:
            self._is_collecting = True

    def _end_collection(self, phase: str, info: dict[str, int]) -> None:
        if phase == "stop" and threading.get_ident() == self._thread:
            self._is_collecting = False

    def _note(self, frame: FrameType, event: str, arg: Any) -> None:
        if self._before is not None:
            self._before(frame, event, arg)
        if self._is_collecting:
            return
        code = frame.f_code
        if event == "call":
            if code is _CALL:
                called = frame.f_locals["self"]
                self.modules[id(called)] = called
            if self.is_later and is_users(code.co_filename):
                self.later.add(code)
            if code not in self.codes and is_users(code.co_filename):
                if code.co_filename != GENERATED_CODE:
                    self.codes[code] = frame.f_globals
            elif code not in self.of_libraries and is_librarys(code.co_filename):
                self.of_libraries[code] = frame.f_globals
            elif code in _BACKWARD:  # what runs in the backward pass
                later = frame.f_locals.get("hook") or frame.f_locals["cls"].backward
                later = getattr(later, "__func__", later)
                if type(later) is FunctionType and is_users(later.__code__.co_filename):
                    self.codes.setdefault(later.__code__, later.__globals__)
                    self.later.add(later.__code__)
            elif code is _ENVIRON:
                caller: FrameType | None = frame
                for _ in range(3):
                    caller = None if caller is None else caller.f_back
                    if caller is not None and caller.f_code in self.codes:
                        self._add(caller, "os.environ")
            elif code in _READERS:
                caller = self._users_frame(frame.f_back)
                if caller is not None:
                    self._add(caller, _READERS[code])
        elif event == "c_call" and _is_getter(arg):
            if self._users_frame(frame) is not None:
                self.getters[arg] = None
        elif event == "c_call" and arg.__name__ == "scaled_dot_product_attention":
            self.getters.update(dict.fromkeys(_ATTENTION))
        elif event == "c_call" and code in self.codes and _is_impure_in_users_code(arg):
            self._add(frame, f"{arg.__name__}()")
        elif event == "c_call" and not self.impure and _is_impure(arg):
            reads_seed = arg.__name__ == "initial_seed" or arg is is_onednn_on
            caller = frame
            while caller is not None and caller.f_code not in self.codes:  # in a library
                name = caller.f_code.co_filename
                if name.startswith(_IMPORTS) or is_mirrors(name):
                    return
                if is_torchs(name) and not reads_seed:
                    return
                caller = caller.f_back
            if caller is not None:
                self._add(caller, f"{arg.__name__}()")

    def _users_frame(self, frame: FrameType | None) -> FrameType | None:
        """Returns the user's code that calls, itself or by code of torch."""
        while frame is not None and is_torchs(frame.f_code.co_filename):
            frame = frame.f_back
        return frame if frame is not None and frame.f_code in self.codes else None

    def _add(self, frame: FrameType, what: str) -> None:
        place = frame.f_code.co_filename, frame.f_lineno
        self.impure = self.impure or f"{quote(place)}: it calls {what}"

    def layers_of(self, module: nn.Module) -> list[nn.Module]:
        """Returns the layers of a module, and those of other modules that the call has used."""
        found = chain.from_iterable(one.modules() for one in (module, *self.modules.values()))
        return list(dict.fromkeys(found))

    def modes(self) -> dict[Callable[[], Any], Any]:
        """Returns the functions that return modes of torch, and the modes of now."""
        found: dict[Callable[[], Any], Any] = {}
        for getter in self.getters:
            with suppress(Exception):  # it needs an argument
                mode = getter()
                if isinstance(mode, PLAIN):
                    found[getter] = mode
        return found

    def functions(self, modules: Collection[nn.Module]) -> list[Callable[..., Any]]:
        """Returns all functions with this code, and the hooks of the backward pass.

        Closures with one code are several functions.

        Raises:
            CompileError: a closure is not found, since ``gc.freeze`` hides it.
        """
        hooks = _backward_hooks(modules)
        found = self._select([*_members(modules), *gc.get_objects()])
        gone = self.codes.keys() - {one.__code__ for one in found}
        made = {constant for code in self.codes for constant in code.co_consts}
        if gc.get_freeze_count():  # else the call has made closures that are gone
            made = {one for one in made if getattr(one, "co_name", "") in _COMPREHENSIONS}
        gone -= made
        for code in gone:
            if code.co_freevars:
                place = quote((code.co_filename, code.co_firstlineno))
                raise CompileError(f"{place}: the variables around a function are not found")
            found.append(FunctionType(code, self.codes[code]))
        return list(dict.fromkeys([*found, *hooks]))

    def of_backward(
        self, functions: Sequence[Any], modules: Collection[nn.Module]
    ) -> FreeVariables | None:
        """Returns the values that the backward pass reads; ``None`` if it has no code of users."""
        hooks = _backward_hooks(modules)
        later = [one for one in functions if getattr(one, "__code__", None) in self.later]
        if not (later or hooks):
            return None
        return FreeVariables([*later, *hooks], modules, is_strict=True)

    def functions_of(self, modules: Collection[nn.Module]) -> list[Callable[..., Any]]:
        """Returns these functions without closures, but for the methods of modules' classes."""
        found = self._select(_members(modules))
        rest = self.codes.keys() - {one.__code__ for one in found}
        return [*found, *[FunctionType(c, self.codes[c]) for c in rest if not c.co_freevars]]

    def _select(self, held: Sequence[Any]) -> list[Any]:
        return [one for one in held if type(one) is FunctionType and one.__code__ in self.codes]

    def surroundings(
        self, functions: Sequence[Any], modules: Collection[nn.Module]
    ) -> FreeVariables:
        """Returns the values that the code finds by their names.

        Args:
            functions: what ``functions`` has returned.
        """
        return FreeVariables(functions, modules, is_strict=True, of_libraries=self.of_libraries)

    def check(self, functions: Sequence[Any], modules: Collection[nn.Module]) -> None:
        """Raises CompileError if the call reads what cannot be compared before the next one."""
        if self.impure:
            raise CompileError(f"{self.impure}, which a program would do once and never again")
        around = self.surroundings(functions, modules)
        if not around.is_complete:
            raise CompileError("its code uses too many values to compare before each call")
        for entry in around.entries:
            if _is_opaque(entry.value()):
                line = line_about(around.codes, [entry.read_as])
                raise CompileError(
                    f"{line}: it uses {entry.name}, a {type(entry.value()).__name__}, whose "
                    "changes cannot be noticed; use numbers, lists, dicts or tensors"
                )


def _members(modules: Collection[nn.Module]) -> list[Any]:
    """Returns what the classes of modules hold."""
    kinds = dict.fromkeys(kind for module in modules for kind in type(module).__mro__)
    return [*chain.from_iterable(vars(kind).values() for kind in kinds)]


def _backward_hooks(modules: Collection[nn.Module]) -> list[Any]:
    return [hook for m in modules for name in BACKWARD_HOOKS for hook in vars(m)[name].values()]


def _is_impure(function: Any) -> bool:
    owner = getattr(function, "__self__", None)
    if isinstance(owner, _GENERATORS):
        return True
    if isinstance(owner, type):
        return owner in _CLOCKS and function.__name__ in ("now", "today", "utcnow")
    if getattr(function, "__module__", None) in _MODULES or function is is_onednn_on:
        return True  # a trace turns oneDNN off
    return isinstance(owner, type(builtins)) and function in _BUILTINS


def _is_impure_in_users_code(function: Any) -> bool:
    if not isinstance(getattr(function, "__self__", None), ModuleType):
        return False
    of_interpreter = function.__module__ == "sys" and function.__name__.startswith(("get", "_get"))
    return of_interpreter or function in _DIRECT


def _is_getter(function: Any) -> bool:
    return (
        isinstance(getattr(function, "__self__", None), ModuleType)
        and str(function.__module__).partition(".")[0] == "torch"
        and function.__name__.startswith(_GETTERS)
        and function is not is_onednn_on
    )


def _is_opaque(value: Any) -> bool:
    """Whether a value may change, and no guard can compare what it holds."""
    if isinstance(value, _OPAQUE) or hasattr(type(value), "__next__"):
        return True
    if isinstance(value, (dict, list, tuple, set, frozenset)):
        return len(value) > MAX_ENTRIES
    if isinstance(value, BuiltinFunctionType):  # the append of a list, say
        return not isinstance(value.__self__, (type, ModuleType, type(None)))
    library = type(value).__module__.partition(".")[0]
    if isinstance(value, (*PLAIN, *_CONSTANT)) or library in ("torch", "numpy", "mirror"):
        return False
    return type(value) is not object and not hasattr(value, "__dict__")
