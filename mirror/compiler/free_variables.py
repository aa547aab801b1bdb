"""Free variables: the values that the code of a step finds by name, outside its arguments.

Code finds values by names in closure cells, globals and defaults, and from there in attributes of
objects and entries of dicts and lists. ``FreeVariables`` follows the names as far as the code can,
through the user's functions that it names:

    a dict, a list, a set     every entry
    an object, a class        the attributes that the code names

Numbers, strings and the like are compared by value, everything else by identity. Tensors, modules
and optimizers have guards of their own. Containers of more than 256 entries are not followed, and
neither are values deeper than 5 levels.

A search that is strict follows code as Python finds it, so that a change of the code itself shows:

    a function                its code, defaults and attributes; wrappers, and what they wrap
    a class, its bases        all that the code names there, also where a base hides another
    modules that are called   their methods, and the functions of torch that these name
    a module of Python        what the code names there, also if ``forward`` imports it
    an object                 its class
    a dict                    the order of its keys
"""

from __future__ import annotations

import contextlib
import dis
import functools
import importlib.util
import inspect
import logging
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from itertools import chain, repeat
from types import (
    CellType,
    CodeType,
    FunctionType,
    MappingProxyType,
    MethodType,
    ModuleType,
)
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from mirror.base.torch_private import MODULE_HOOKS, WHOLE_CALL
from mirror.compiler.step_errors import is_users
from mirror.values import are_identical

PLAIN = (bool, int, float, str, bytes, complex, type(None), torch.dtype, torch.device)
MAX_ENTRIES = 256
_MAX_DEPTH, _MAX_WATCHED, _MAX_FUNCTIONS = 5, 1000, 100
_OF_MODULES = frozenset(vars(nn.Module()))
_MISSING: Any = object()
_CONTENTS, _BASES = operator.attrgetter("cell_contents"), operator.attrgetter("__mro__")
_BUFFERS = operator.attrgetter("_buffers")
_OF_FUNCTION = operator.attrgetter("__code__", "__defaults__", "__kwdefaults__")
_WRAPPERS = functools.__file__, contextlib.__file__  # their functions hold the user's
_REPLACEABLE = "_modules", "_parameters", *MODULE_HOOKS  # by other dicts
_CALLING = {"forward", "__call__", WHOLE_CALL}  # of every module
_IMPLICIT = {"__call__", "forward", "backward", "setup_context"}  # no code names them
_FOLLOWED_IN_LIBRARIES = (ModuleType, dict, list, tuple)
_NOT_FOLLOWED = (Tensor, nn.Module, Optimizer)
_OF_LIBRARIES = ("torch", "mirror", "numpy", "builtins")


class Entry:
    """A value, named by the place that holds it.

    Attributes:
        name: the place in words.
        key: the name or index by which code finds it.
        holder: a cell, a dict, a list, a tuple, or a class.
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
        if isinstance(holder, type):
            return vars(holder).get(self.key, _MISSING)
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
        elif isinstance(self.holder, type):
            if value is _MISSING:
                delattr(self.holder, self.key)
            else:
                setattr(self.holder, self.key, value)
        elif isinstance(self.holder, list) and self.key < len(self.holder):
            self.holder[self.key] = value


class FreeVariables:
    """The values that functions find by their names.

    Args:
        functions: the step, and others that are called with it, such as hooks.
        modules: their attributes are followed, except tensors and submodules.
        is_strict: whether private attributes, and the code itself, are followed, too.
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
        for kind in set() if is_strict else {type(module) for module in self._modules}:
            for function in _functions_of(kind):
                self._names |= _names_in(function.__code__)
        self._queue: list[Any] = list(functions)
        self._roots: list[tuple[Entry, bool]] = []
        self._known: dict[Any, Any] = {}
        self._functions: list[FunctionType] = []
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
            self._objects: list[Any] = []
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
        found += [_contents_of(container) for _, container in self.sizes]
        return [*found, *map(make_comparable, self._read_code())]

    def _read_code(self) -> list[Any]:
        """Returns what is compared by identity: code, classes, keys in their order."""
        if not self._is_strict:
            return []
        dicts = [*map(vars, self._modules)]
        names = chain.from_iterable(map(repeat, _REPLACEABLE, repeat(len(dicts))))
        return [
            *chain.from_iterable(map(_OF_FUNCTION, self._functions)),
            *map(type, self._objects),
            *map(type, self._modules),
            *map(len, dicts),
            *map(len, map(_BUFFERS, self._modules)),
            *map(_BASES, map(type, self._objects)),
            *map(_BASES, map(type, self._modules)),
            *map(dict.get, dicts * len(_REPLACEABLE), names),
            *chain.from_iterable([one for _, one in self.sizes if isinstance(one, dict)]),
        ]

    def watch(self) -> Callable[[], bool]:
        """Returns a function: whether each place holds the object that it holds now.

        It compares in C. If it returns False, values may be equal still: ``scan`` compares them.
        """
        dicts, cells, rest = list[Entry](), list[Any](), list[Entry]()
        classes: list[Entry] = []
        for entry in self.entries:
            if type(entry.holder) is dict:
                dicts.append(entry)
            elif isinstance(entry.holder, type):
                classes.append(entry)
            elif isinstance(entry.holder, CellType):
                cells.append(entry.holder)
            else:
                rest.append(entry)
        holders, keys = [entry.holder for entry in dicts], [entry.key for entry in dicts]
        proxies = [vars(entry.holder) for entry in classes]
        names = [entry.key for entry in classes]
        containers = [container for _, container in self.sizes]
        sets = [container for container in containers if isinstance(container, set)]

        def find() -> list[Any]:
            return [
                *map(dict.get, holders, keys, repeat(_MISSING)),
                *map(MappingProxyType.get, proxies, names, repeat(_MISSING)),
                *map(_CONTENTS, cells),
                *[entry.value() for entry in rest],
                *map(len, containers),
                *self._read_code(),
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
            *["code, a class or the keys of a dict"] * len(self._read_code()),
        ]

    # Functions

    def _take(self, function: Any) -> None:
        """Records the values that a function finds."""
        key = self._key_of(function)
        if key in self._known:
            return
        self._known[key] = function
        if isinstance(function, functools.partial):
            self._root(Entry("the arguments of a partial", 0, [function.args]), whole=True)
            self._root(Entry("the arguments of a partial", 0, [function.keywords]), whole=True)
            function = function.func
        if isinstance(function, MethodType):
            owner = function.__self__
            if not isinstance(owner, _NOT_FOLLOWED):
                self._root(Entry(type(owner).__name__, 0, [owner]), whole=True)
            function = function.__func__
        if not self._is_strict:
            function = _unwrap(function)
        if not isinstance(function, FunctionType):
            if not isinstance(function, (type, *_NOT_FOLLOWED)) and callable(function):
                self._root(Entry(type(function).__name__, 0, [function]), whole=True)
            return
        code, where = function.__code__, function.__qualname__
        if not is_users(code.co_filename):
            if self._is_strict and code.co_filename in _WRAPPERS:
                self._take_cells(function)
            if self._is_strict and hasattr(function, "__wrapped__"):
                self._find(function.__wrapped__)
            return
        self.codes.append(code)
        self._names |= _names_in(code)
        self._take_cells(function)
        names = _globals_of(code)
        if self._is_strict:
            self._functions.append(function)
            if vars(function):
                held = [vars(function)]
                self._root(Entry(f"the attributes of {where}", 0, held), whole=True)
            if "globals" in names:
                names = names | _names_in(code)
            for name in _imported_by(code, function.__globals__):
                self._root(Entry(f"module {name!r}", name, sys.modules))
        for name in sorted(names):
            if name in function.__globals__:
                self._root(Entry(f"global {name!r} of {where}", name, function.__globals__))
        for values in (function.__defaults__, function.__kwdefaults__):
            if values:
                self._root(Entry(f"the defaults of {where}", 0, [values]), whole=True)

    def _take_cells(self, function: FunctionType) -> None:
        names = function.__code__.co_freevars
        for name, cell in zip(names, function.__closure__ or (), strict=True):
            what = f"variable {name!r} around {function.__qualname__}"
            self._root(Entry(what, name, cell))

    def _key_of(self, function: Any) -> Any:
        if not self._is_strict:
            return id(_unwrap(function))
        if isinstance(function, MethodType):
            return id(function.__func__), id(function.__self__)
        return id(function)

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
        if isinstance(value, ModuleType):
            self._follow_python_module(value, name, depth)
            return
        kind = value if isinstance(value, type) else type(value)
        if kind.__module__.partition(".")[0] in _OF_LIBRARIES:
            return
        fields = getattr(value, "__dict__", None)
        is_object = isinstance(fields, dict)  # neither a class, nor one with slots
        if not isinstance(fields, dict):
            fields = {}
        if isinstance(value, logging.Logger):  # it also knows all others, and has a cache
            for key in ("disabled", "level", "parent"):
                self._add(Entry(f"{name}.{key}", key, fields), depth)
            return
        users = [base for base in kind.__mro__ if is_users(_file_of(base))]
        names = self._names | _IMPLICIT
        if self._is_strict and is_object and len(users) < len(kind.__mro__) - 1:
            self.sizes.append((name, fields))  # methods of a library read other names
            self.read_as[id(fields)] = read_as
            keys = {key for key in fields if isinstance(key, str)}
        else:
            if self._is_strict and is_object:  # others may be added
                self.sizes.append((name, fields))
                self.read_as[id(fields)] = read_as
            keys = self._names & fields.keys()
        if self._is_strict:
            of_class = {key for base in users for key in names & vars(base).keys()}
            self._objects.append(value)
            self._watch_hidden(users, of_class)
        for key in sorted(keys):
            self._add(Entry(f"{name}.{key}", key, fields), depth)
        for base in users:
            for key in sorted((names & vars(base).keys()) - fields.keys()):
                self._follow_of_class(base, key, depth)

    def _watch_hidden(self, kinds: Sequence[type], keys: Set[str]) -> None:
        """Watches where a class does not define what another one of its bases does."""
        for kind in kinds:
            for key in sorted(keys - vars(kind).keys()):
                self.entries.append(Entry(f"{kind.__name__}.{key}", key, kind))

    def _follow_python_module(self, module: ModuleType, name: str, depth: int) -> None:
        """Follows what the code names in a module of Python; of libraries, what may be patched."""
        are_users = is_users(getattr(module, "__file__", None) or "<")
        if not (are_users or self._is_strict):
            return
        for key in sorted(self._names & vars(module).keys()):
            entry = Entry(f"{name}.{key}", key, vars(module))
            if are_users or isinstance(entry.value(), _FOLLOWED_IN_LIBRARIES):
                self._add(entry, depth)
            else:
                self.entries.append(entry)

    def _follow_of_class(self, kind: type, key: str, depth: int) -> None:
        found = vars(kind)[key]
        entry = Entry(f"{kind.__name__}.{key}", key, kind)
        function = found
        for held in ("__func__", "fget", "func"):  # of methods and properties
            function = getattr(function, held, function)
        if isinstance(function, FunctionType):
            self._find(function)
            if self._is_strict:
                self.entries.append(entry)
        elif self._is_strict or isinstance(found, (*PLAIN, dict, list, tuple)):
            self._add(entry, depth)

    def _add(self, entry: Entry, depth: int) -> None:
        self.entries.append(entry)
        self._follow(entry.value(), entry.name, entry.read_as, depth + 1)

    def _find(self, function: Any) -> None:
        if self._key_of(function) not in self._known:
            self._queue.append(function)

    def _follow_modules(self) -> None:
        if self._is_strict:
            self._follow_layers()
        for module in self._modules:
            for key, value in vars(module).items():
                is_private = key.startswith("_")
                if (key not in self._names and key != "forward") or (
                    key in _OF_MODULES if self._is_strict else is_private
                ):
                    continue
                if isinstance(value, PLAIN) and not self._is_strict:
                    continue  # guarded with the module
                if not isinstance(value, _NOT_FOLLOWED):
                    self._add(Entry(f"{type(module).__name__}.{key}", key, vars(module)), 0)

    def _follow_layers(self) -> None:
        """Follows the classes of modules; of libraries' ones, methods and what these call."""
        functions: set[str] = set()
        types = dict.fromkeys(map(type, self._modules))
        for kind in types:
            users = [base for base in kind.__mro__ if is_users(_file_of(base))]
            keys = {key for base in users for key in self._names & vars(base).keys()}
            self._watch_hidden(users, keys | {"forward"})
        for kind in dict.fromkeys(chain.from_iterable(one.__mro__ for one in types)):
            if is_users(_file_of(kind)):
                for key in sorted((self._names | {"forward"}) & vars(kind).keys()):
                    self._follow_of_class(kind, key, 0)
                continue
            for key, found in vars(kind).items():
                if isinstance(found, FunctionType) and (kind is not nn.Module or key in _CALLING):
                    self.entries.append(Entry(f"{kind.__name__}.{key}", key, kind))
                    functions |= _names_in(found.__code__) & vars(F).keys()
        for name in sorted(functions):
            self.entries.append(Entry(f"functional.{name}", name, vars(F)))
        for name in sorted(self._names):
            if hasattr(Tensor, name):
                self.entries.append(Entry(f"Tensor.{name}", name, Tensor))


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


def _imported_by(code: CodeType, where: dict[str, Any]) -> set[str]:
    """Returns the modules that code imports, and the packages that they are in."""
    found: set[str] = set()
    instructions = [*dis.get_instructions(code)]
    for i, one in enumerate(instructions):
        if one.opname == "IMPORT_NAME":  # after its level and the names that it takes
            level = instructions[i - 2].argval
            name = one.argval
            if isinstance(level, int) and level > 0:
                name = importlib.util.resolve_name("." * level + name, where.get("__package__"))
            parts = name.split(".")
            found |= {".".join(parts[: n + 1]) for n in range(len(parts))}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= _imported_by(constant, where)
    return found & sys.modules.keys()


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
