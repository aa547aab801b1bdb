"""Migration hints: errors for names and keywords of other libraries say what to write instead.

Programs for TensorFlow, DistributedDataParallel, Fabric, Accelerate, Horovod, DeepSpeed or JAX use
names that mirror lacks. They raise AttributeError or TypeError, as any unknown name does (so
``hasattr`` is False), with a hint. ``migration_hints.txt`` has all hints; it is read at the first
missing name, so names that exist cost nothing. A class also has its base classes' hints; its own
come first.
"""

from __future__ import annotations

import dis
import inspect
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, wraps
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar

ClassT = TypeVar("ClassT", bound=type)
FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])

_FILE = Path(__file__).with_suffix(".txt")
_SECTION = re.compile(r"^\[(.+)\]$", re.MULTILINE)
_ENTRY = re.compile(r"^(\S.*(?:\n  \S.*)*)\n((?:    .*\n)+)", re.MULTILINE)
_IMPORT_FROM = dis.opmap["IMPORT_FROM"]
# The keyword for a positional argument, by the name of its class, which TensorFlow has, too.
_KEYWORDS = {"ClusterResolver": "cluster_resolver", "ClusterSpec": "cluster", "dict": "cluster"}


@dataclass(frozen=True)
class Hint:
    """The hint for one name.

    Attributes:
        library: the library that has the name.
        way: what to do instead.
    """

    library: str
    way: str


def add_hints(cls: ClassT) -> ClassT:
    """Decorates a class so that a missing attribute raises an error with its hint."""

    def __getattr__(self: object, name: str) -> NoReturn:
        raise attribute_error(self, name)

    cls.__getattr__ = __getattr__  # type: ignore[attr-defined]
    return cls


def attribute_error(thing: object, name: str) -> AttributeError:
    """Returns the error for an attribute that an object lacks, with the hint if there is one.

    For a class with a ``__getattr__`` of its own; others are decorated by ``add_hints``.
    """
    kind = type(thing)
    hint = find((base.__name__ for base in kind.__mro__), name)
    if hint is None:
        text = f"{kind.__name__!r} object has no attribute {name!r}"
        return AttributeError(text, name=name, obj=thing)
    return AttributeError(f"a {kind.__name__} has no {format_hint(name, hint)}")


def call_with_hints(cls: ClassT) -> ClassT:
    """Decorates a class as ``add_hints`` does, and checks the arguments of its constructor.

    A keyword of the table, or a positional argument that belongs to a keyword, raises TypeError.
    """
    init_with_hints(cls)
    return add_hints(cls)


def init_with_hints(cls: ClassT) -> ClassT:
    """Decorates the constructor as ``call_with_hints``; the class has its own ``__getattr__``."""
    place = cls.__name__
    init: Callable[..., None] = cls.__init__  # type: ignore[misc]
    known = frozenset(inspect.signature(init).parameters)
    places = [f"{base.__name__}()" for base in cls.__mro__]

    @wraps(init)
    def __init__(self: object, *args: Any, **kwargs: Any) -> None:
        _check_keywords(place, places, known, kwargs)
        for value in args:
            kinds = (base.__name__ for base in type(value).__mro__)
            name = next((_KEYWORDS[kind] for kind in kinds if kind in _KEYWORDS), None)
            if name in known:
                kind = type(value).__name__
                raise TypeError(f"{place}() takes a {kind} by its name; pass {name}=")
            if name is not None and not isinstance(value, dict):
                _check_keywords(place, places, known, (name,))
        init(self, *args, **kwargs)

    cls.__init__ = __init__  # type: ignore[misc]
    return cls


def keywords_with_hints(place: str) -> Callable[[FunctionT], FunctionT]:
    """Decorates a function so that foreign keywords, under ``place`` in the table, raise a hint.

    It adds one Python call to each call: not for functions that every step calls.
    """

    def decorate(function: FunctionT) -> FunctionT:
        known = frozenset(inspect.signature(function).parameters)

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            _check_keywords(place, [f"{place}()"], known, kwargs)
            return function(*args, **kwargs)

        return call  # type: ignore[return-value]

    return decorate


def names_of(module: str, lazy: Mapping[str, str] = MappingProxyType({})) -> Callable[[str], Any]:
    """Returns a module's ``__getattr__``, which raises hints for foreign names.

    Args:
        lazy: names that are imported at their first use, and the module that defines each; that
            of a submodule is the submodule.
    """

    def __getattr__(name: str) -> Any:
        if name in lazy:
            value: Any = import_module(lazy[name])
            if lazy[name] != f"{module}.{name}":
                value = getattr(value, name)
            setattr(sys.modules[module], name, value)  # not asked for again
            return value
        hint = find([module], name)
        if hint is None:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        text = f"{module} has no {format_hint(name, hint)}"
        # `from mirror import name` would replace an AttributeError by an error without the hint.
        frame = sys._getframe(1)
        if frame.f_lasti >= 0 and frame.f_code.co_code[frame.f_lasti] == _IMPORT_FROM:
            raise ImportError(text, name=module)
        raise AttributeError(text)

    return __getattr__


def find(places: Iterable[str], name: str) -> Hint | None:
    """Returns the hint for a name from the first place that has one, else ``None``."""
    if name.startswith("_"):
        return None
    known = table()
    return next((known[place][name] for place in places if name in known.get(place, ())), None)


@cache
def table() -> Mapping[str, Mapping[str, Hint]]:
    """Returns all hints: by place, see ``migration_hints.txt``, and by name."""
    sections = {title: dict(entries) for title, entries in entries_of(_FILE.read_text("ascii"))}
    phrases = sections.pop("phrases")
    return {
        title: {
            name: Hint(head.partition(": ")[0], way.format_map(phrases))
            for head, way in entries.items()
            for name in head.partition(": ")[2].split()
        }
        for title, entries in sections.items()
    }


def entries_of(text: str) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Yields each section's title with its entries: heads and texts, each on one line."""
    _, *parts = _SECTION.split(text)  # title and body alternate
    for title, body in zip(parts[::2], parts[1::2], strict=True):
        yield title, [(" ".join(a.split()), " ".join(b.split())) for a, b in _ENTRY.findall(body)]


def _check_keywords(
    place: str, places: Iterable[str], known: Collection[str], names: Iterable[str]
) -> None:
    """Raises TypeError for an unknown keyword that has a hint in the table."""
    for name in names:
        if name not in known:
            hint = find(places, name)
            if hint is not None:
                raise TypeError(f"{place}() takes no {format_hint(name, hint)}")


def format_hint(name: str, hint: Hint) -> str:
    """Returns a name, its library and the way, for an error."""
    return f"{name!r} ({hint.library}); {hint.way}"
