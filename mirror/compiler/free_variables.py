"""Free variables: the values that the code of a step finds by name, outside its arguments.

Code finds values by names in closure cells, globals and defaults, and from there in attributes of
objects and entries of dicts and lists. ``FreeVariables`` follows the names as far as the code can,
through the user's functions that it names:

    a dict, a list, a set     every entry
    an object, a class        the attributes that the code names

Numbers, strings and the like are compared by value, everything else by identity. Tensors, modules
and optimizers have guards of their own. Containers of more than 256 entries are not followed, and
neither are values deeper than 5 levels.
"""

from __future__ import annotations

import dis
import functools
import inspect
import logging
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from itertools import chain, repeat
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mirror.compiler.step_errors import is_users
from mirror.values import are_identical

PLAIN = (bool, int, float, str, bytes, complex, type(None), torch.dtype, torch.device)
MAX_ENTRIES = 256
_MAX_DEPTH, _MAX_WATCHED, _MAX_FUNCTIONS = 5, 1000, 100
_OF_MODULES = frozenset(vars(nn.Module()))
_MISSING: Any = object()
_CONTENTS = operator.attrgetter("cell_contents")
_NOT_FOLLOWED = (Tensor, nn.Module, Optimizer)
_OF_LIBRARIES = ("torch", "mirror", "numpy", "builtins")


class Entry:
    """A value, named by the place that holds it.

    Attributes:
        name: the place in words.
        key: the name or index by which code finds it.
        holder: a cell, a dict, a list or a tuple.
        read_as: the name by which code finds it, or finds the container that it is in.
    """

    __slots__ = ("holder", "key", "name", "read_as")

    def __init__(self, name: str, key: Any, holder: Any, read_as: Any = None) -> None:
        self.name, self.key, self.holder = name, key, holder
        self.read_as = key if isinstance(key, str) else read_as

    def value(self) -> Any:
        """Returns the value of now."""
        holder = self.holder
        if isinstance(holder, CellType):
            try:
                return holder.cell_contents
            except ValueError:  # not assigned yet
                return None
        if isinstance(holder, dict):
            return holder.get(self.key, _MISSING)
        return holder[self.key] if self.key < len(holder) else _MISSING

    def put(self, value: Any) -> None:
        """Puts a former value back."""
        if isinstance(self.holder, CellType):
            self.holder.cell_contents = value
        elif isinstance(self.holder, dict):
            if value is _MISSING:
                self.holder.pop(self.key, None)
            else:
                self.holder[self.key] = value
        elif isinstance(self.holder, list) and self.key < len(self.holder):
            self.holder[self.key] = value


class FreeVariables:
    """The values that functions find by their names.

    Args:
        functions: the step, and others that are called with it, such as hooks.
        modules: their attributes are followed, except tensors and submodules.
        is_strict: whether private attributes, and those of classes, are followed, too.
        of_libraries: code of libraries that is called, with its globals: of these, numbers,
            strings and the like are followed, and the attributes that the code names.

    Attributes:
        entries: the values found.
        is_complete: whether the numbers of functions and values were small enough to follow all.
        codes: the code of the user's functions that are followed.
        sizes: the containers whose number of entries is compared, with their names; of a set, the
            entries are.
        read_as: by ``id`` of such a container, the name by which code finds it.
    """

    def __init__(
        self,
        functions: Sequence[Any],
        modules: Iterable[nn.Module] = (),
        *,
        is_strict: bool = False,
        of_libraries: Mapping[CodeType, dict[str, Any]] | None = None,
    ) -> None:
        self._is_strict, self.is_complete = is_strict, True
        self._most_functions = _MAX_FUNCTIONS * (10 if is_strict else 1)
        self.codes: list[CodeType] = []
        self._modules = list(modules)
        self._names: set[str] = set()
        for kind in {type(module) for module in self._modules}:
            for function in _functions_of(kind):
                self._names |= _names_in(function.__code__)
        self._queue: list[Any] = list(functions)
        self._roots: list[tuple[Entry, bool]] = []
        self._known: dict[int, Any] = {}
        for code, around in (of_libraries or {}).items():
            self._take_librarys(code, around)
        while True:
            while self._queue and len(self.codes) < self._most_functions:
                self._take(self._queue.pop(0))
            self.is_complete = not self._queue
            self._queue.clear()
            self.entries: list[Entry] = []
            self.sizes: list[tuple[str, Any]] = []
            self.read_as: dict[int, Any] = {}
            self._seen: set[int] = set()
            for entry, is_whole in list(self._roots):
                if not is_whole:
                    self.entries.append(entry)
                self._follow(entry.value(), entry.name, entry.read_as, 0)
            self._follow_modules()
            if not self._queue or len(self.codes) >= self._most_functions:
                self.is_complete = self.is_complete and not self._queue
                break

    def scan(self) -> list[Any]:
        """Returns the current values, ready to be compared."""
        found = [make_comparable(entry.value()) for entry in self.entries]
        return [*found, *[_contents_of(container) for _, container in self.sizes]]

    def watch(self) -> Callable[[], bool]:
        """Returns a function: whether each place holds the object that it holds now.

        It compares in C. If it returns False, values may be equal still: ``scan`` compares them.
        """
        dicts, cells, rest = list[Entry](), list[Any](), list[Entry]()
        for entry in self.entries:
            if type(entry.holder) is dict:
                dicts.append(entry)
            elif isinstance(entry.holder, CellType):
                cells.append(entry.holder)
            else:
                rest.append(entry)
        holders, keys = [entry.holder for entry in dicts], [entry.key for entry in dicts]
        containers = [container for _, container in self.sizes]
        sets = [container for container in containers if isinstance(container, set)]

        def find() -> list[Any]:
            return [
                *map(dict.get, holders, keys, repeat(_MISSING)),
                *map(_CONTENTS, cells),
                *[entry.value() for entry in rest],
                *map(len, containers),
                *(chain.from_iterable(sets) if sets else ()),  # in the order of an iteration
            ]

        try:
            then = find()
        except ValueError:  # a variable is not assigned yet
            return lambda: False

        def are_same() -> bool:
            try:
                return are_identical(find(), then)
            except ValueError:
                return False

        return are_same

    @property
    def names(self) -> list[str]:
        """The description of each value that ``scan`` returns."""
        return [
            *[entry.name for entry in self.entries],
            *[
                f"{'the' if isinstance(one, set) else 'the number of'} entries of {name}"
                for name, one in self.sizes
            ],
        ]

    # Functions

    def _take(self, function: Any) -> None:
        """Records the values that a function finds."""
        bare = _unwrap(function)
        if id(bare) in self._known:
            return
        self._known[id(bare)] = bare
        if isinstance(function, functools.partial):
            self._root(Entry("the arguments of a partial", 0, [function.args]), whole=True)
            self._root(Entry("the arguments of a partial", 0, [function.keywords]), whole=True)
            function = function.func
        if isinstance(function, MethodType):
            owner = function.__self__
            if not isinstance(owner, _NOT_FOLLOWED):
                self._root(Entry(type(owner).__name__, 0, [owner]), whole=True)
            function = function.__func__
        function = _unwrap(function)
        if not isinstance(function, FunctionType):
            if not isinstance(function, (type, *_NOT_FOLLOWED)) and callable(function):
                self._root(Entry(type(function).__name__, 0, [function]), whole=True)
            return
        code = function.__code__
        if not is_users(code.co_filename):
            return
        self.codes.append(code)
        self._names |= _names_in(code)
        where = function.__qualname__
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            self._root(Entry(f"variable {name!r} around {where}", name, cell))
        for name in sorted(_globals_of(code)):
            if name in function.__globals__:
                self._root(Entry(f"global {name!r} of {where}", name, function.__globals__))
        for values in (function.__defaults__, function.__kwdefaults__):
            if values:
                self._root(Entry(f"the defaults of {where}", 0, [values]), whole=True)

    def _take_librarys(self, code: CodeType, around: dict[str, Any]) -> None:
        self._names |= _names_in(code)
        for name in sorted(_globals_of(code)):
            if isinstance(around.get(name, _MISSING), PLAIN):
                self._root(Entry(f"global {name!r} of {code.co_name}", name, around))

    def _root(self, entry: Entry, *, whole: bool = False) -> None:
        self._roots.append((entry, whole))

    # Values

    def _follow(self, value: Any, name: str, read_as: Any, depth: int) -> None:
        if isinstance(value, (FunctionType, MethodType, functools.partial)):
            self._find(value)
            return
        if isinstance(value, (*PLAIN, *_NOT_FOLLOWED)):
            return
        if len(self.entries) > _MAX_WATCHED * (10 if self._is_strict else 1):
            self.is_complete = False
            return
        if depth > _MAX_DEPTH or id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, (dict, list, tuple)):
            if len(value) > MAX_ENTRIES:
                return
            if not isinstance(value, tuple):
                self.sizes.append((name, value))
                self.read_as[id(value)] = read_as
            keys: Iterable[Any] = list(value) if isinstance(value, dict) else range(len(value))
            for key in keys:
                self._add(Entry(f"entry {key!r} of {name}", key, value, read_as), depth)
            return
        if isinstance(value, (set, frozenset)):
            if len(value) > MAX_ENTRIES:
                return
            if isinstance(value, set):
                self.sizes.append((name, value))
                self.read_as[id(value)] = read_as
            held = tuple(value)
            for i in range(len(held)):
                self._add(Entry(f"an entry of {name}", i, held, read_as), depth)
            return
        self._follow_object(value, name, read_as, depth)

    def _follow_object(self, value: Any, name: str, read_as: Any, depth: int) -> None:
        kind = value if isinstance(value, type) else type(value)
        if kind.__module__.partition(".")[0] in _OF_LIBRARIES and not isinstance(
            value, ModuleType
        ):
            return
        if isinstance(value, ModuleType) and not is_users(getattr(value, "__file__", None) or "<"):
            return
        fields = getattr(value, "__dict__", {})
        if not isinstance(fields, dict):  # a class: see below
            fields = {}
        is_whole = self._is_strict and not isinstance(value, (type, ModuleType))
        if isinstance(value, logging.Logger):  # it also knows all others, and has a cache
            keys = [key for key in ("level", "disabled", "parent") if key in fields]
        elif is_whole and not is_users(_file_of(kind)):  # methods of a library read other names
            self.sizes.append((name, fields))
            self.read_as[id(fields)] = read_as
            keys = [key for key in fields if isinstance(key, str)]
        else:
            if is_whole:  # others may be added
                self.sizes.append((name, fields))
                self.read_as[id(fields)] = read_as
            keys = sorted(self._names & fields.keys())
        for key in keys:
            self._add(Entry(f"{name}.{key}", key, fields), depth)
        for base in kind.__mro__ if not isinstance(value, ModuleType) else ():
            if not is_users(_file_of(base)):
                continue
            for key in sorted((self._names | {"__call__"}) & vars(base).keys() - fields.keys()):
                found = vars(base)[key]
                found = getattr(found, "__func__", getattr(found, "fget", found))
                if isinstance(found, FunctionType):
                    self._find(found)
                elif isinstance(found, (*PLAIN, dict, list, tuple)):
                    self._add(Entry(f"{base.__name__}.{key}", key, _Fields(base)), depth)

    def _add(self, entry: Entry, depth: int) -> None:
        self.entries.append(entry)
        self._follow(entry.value(), entry.name, entry.read_as, depth + 1)

    def _find(self, function: Any) -> None:
        if id(_unwrap(function)) not in self._known:
            self._queue.append(function)

    def _follow_modules(self) -> None:
        kinds = dict.fromkeys(base for module in self._modules for base in type(module).__mro__)
        for kind in kinds if self._is_strict else ():
            if is_users(_file_of(kind)):
                for key in sorted(self._names & vars(kind).keys()):
                    if isinstance(vars(kind)[key], (*PLAIN, dict, list)):
                        self._add(Entry(f"{kind.__name__}.{key}", key, _Fields(kind)), 0)
        for module in self._modules:
            for key, value in vars(module).items():
                is_private = key.startswith("_")
                if key not in self._names or (
                    key in _OF_MODULES if self._is_strict else is_private
                ):
                    continue
                if isinstance(value, PLAIN) and not (self._is_strict and is_private):
                    continue  # guarded with the module
                if not isinstance(value, _NOT_FOLLOWED):
                    self._add(Entry(f"{type(module).__name__}.{key}", key, vars(module)), 0)


class _Fields(dict[str, Any]):
    """The attributes of a class, as they are now."""

    def __init__(self, kind: type) -> None:
        super().__init__()
        self._kind = kind

    def get(self, key: str, default: Any = None) -> Any:
        return vars(self._kind).get(key, default)

    def __setitem__(self, key: str, value: Any) -> None:
        setattr(self._kind, key, value)


def _unwrap(function: Any) -> Any:
    """Returns the function itself, without a binding or wrappers."""
    function = getattr(function, "__func__", function)
    return inspect.unwrap(function) if isinstance(function, FunctionType) else function


def _functions_of(kind: type) -> Iterator[FunctionType]:
    """Yields the functions of a class and its bases, except those of torch."""
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] != "torch":
            for name, function in vars(base).items():
                if isinstance(function, FunctionType) and name != "__init__":
                    yield function


def _file_of(kind: type) -> str:
    for function in vars(kind).values():
        if isinstance(function, FunctionType):
            return function.__code__.co_filename
    return getattr(inspect.getmodule(kind), "__file__", None) or "<frozen"


def _names_in(code: CodeType) -> set[str]:
    names = {*code.co_names, *[c for c in code.co_consts if isinstance(c, str)]}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names_in(constant)
    return names


@functools.lru_cache(maxsize=4096)  # each new strategy searches its step
def _globals_of(code: CodeType) -> Set[str]:
    names = {i.argval for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL"}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _globals_of(constant)
    return names


class SameObject:
    """An object that is compared by identity; it is kept alive, so its ``id`` stays unique."""

    __slots__ = ("is_then", "what")

    def __init__(self, what: Any) -> None:
        self.what, self.is_then = what, True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SameObject) and self.what is other.what

    __hash__ = None  # type: ignore[assignment]


def _contents_of(container: Any) -> Any:
    """Returns what is compared of a container beside its entries that have places."""
    if isinstance(container, set):
        return [(type(entry), make_comparable(entry)) for entry in container]
    return len(container)


def make_comparable(value: Any) -> Any:
    """Returns a plain value as it is, and any other in a wrapper that compares by identity."""
    if isinstance(value, PLAIN):
        return value
    if type(value) in (tuple, frozenset) and all(isinstance(entry, PLAIN) for entry in value):
        return tuple(value)  # code that iterates sees the order of a set
    return SameObject(value)
