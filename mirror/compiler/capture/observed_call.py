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
import gc
import operator
import os
import random
import re
import sys
import threading
import uuid
from collections.abc import Callable, Collection, Sequence
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
from mirror.errors import CompileError

_MODULES = {"time", "posix", "nt", "_io", "io", "_random", "_socket", "select", "gc"}
_IMPORTS = "<frozen importlib"
_BUILTINS = {builtins.print, builtins.open, builtins.input}
_ENVIRON = type(os.environ).__getitem__.__code__
_APPLY: Any = torch.autograd.Function.apply
_BACKWARD = Tensor.register_hook.__code__, _APPLY.__code__
_COMPREHENSIONS = {"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"}  # before Python 3.12
_GENERATORS = random.Random, torch.Generator
_CLOCKS = {datetime.datetime, datetime.date}
_OPAQUE = (
    *(bytearray, memoryview, collections.deque),
    *(np.ndarray, np.random.Generator, np.random.RandomState, np.random.BitGenerator),
    *(Optimizer, LRScheduler, threading.local),
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
        of_libraries: the code of libraries that has run, with its globals.
        impure: a line that reads a clock, a file or the like; empty if there is none.
    """

    def __init__(self) -> None:
        self.codes: dict[CodeType, dict[str, Any]] = {}
        self.of_libraries: dict[CodeType, dict[str, Any]] = {}
        self.impure = ""
        self._before: Any = None

    @staticmethod
    def is_possible() -> bool:
        """Whether nothing written in C, as cProfile, has the place of the function that notes."""
        return sys.getprofile() is None or callable(sys.getprofile())

    def __enter__(self) -> None:
        self._before = sys.getprofile()
        sys.setprofile(self._note)

    def __exit__(self, *exception: object) -> None:
        sys.setprofile(self._before)

    def _note(self, frame: FrameType, event: str, arg: Any) -> None:
        if self._before is not None:
            self._before(frame, event, arg)
        code = frame.f_code
        if event == "call":
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
            elif code is _ENVIRON:
                caller: FrameType | None = frame
                for _ in range(3):
                    caller = None if caller is None else caller.f_back
                    if caller is not None and caller.f_code in self.codes:
                        self._add(caller, "os.environ")
        elif event == "c_call" and not self.impure and _is_impure(arg):
            reads_seed = arg.__name__ == "initial_seed"
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

    def _add(self, frame: FrameType, what: str) -> None:
        place = frame.f_code.co_filename, frame.f_lineno
        self.impure = self.impure or f"{quote(place)}: it calls {what}"

    def functions(self, modules: Collection[nn.Module]) -> list[Callable[..., Any]]:
        """Returns all functions with this code: closures have several.

        Raises:
            CompileError: a closure is not found, since ``gc.freeze`` hides it.
        """
        kinds = dict.fromkeys(kind for module in modules for kind in type(module).__mro__)
        held = [*chain.from_iterable(vars(kind).values() for kind in kinds), *gc.get_objects()]
        found = [one for one in held if type(one) is FunctionType and one.__code__ in self.codes]
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
        return list(dict.fromkeys(found))

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


def _is_impure(function: Any) -> bool:
    owner = getattr(function, "__self__", None)
    if isinstance(owner, _GENERATORS):
        return True
    if isinstance(owner, type):
        return owner in _CLOCKS and function.__name__ in ("now", "today", "utcnow")
    if getattr(function, "__module__", None) in _MODULES:
        return True
    return isinstance(owner, type(builtins)) and function in _BUILTINS


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
