"""Signposts: what is said where a name or keyword of another library is used.

Whoever comes from TensorFlow, DistributedDataParallel, Fabric, Accelerate, Horovod, DeepSpeed or
JAX writes names that mirror does not have. They are an AttributeError or a TypeError, as any
unknown name is (so ``hasattr`` says no), with a text that says what to write here.
``migration_hints.txt`` holds them all, and is read when the first name is missing: what is there
costs nothing. A class has the signposts of the classes above it, too, and its own go first.
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
from types import ModuleType
from typing import Any, NoReturn, TypeVar

ClassT = TypeVar("ClassT", bound=type)
FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])

_FILE = Path(__file__).with_suffix(".txt")
_SECTION = re.compile(r"^\[(.+)\]$", re.MULTILINE)
_ENTRY = re.compile(r"^(\S.*(?:\n  \S.*)*)\n((?:    .*\n)+)", re.MULTILINE)
_IMPORT_FROM = dis.opmap["IMPORT_FROM"]
# By the name of a class, which TensorFlow's has, too: the keyword that such an argument is for.
_KEYWORDS = {"ClusterResolver": "cluster_resolver", "ClusterSpec": "cluster", "dict": "cluster"}


@dataclass(frozen=True)
class Hint:
    """What is said of one name.

    Attributes:
        library: whose name it is.
        way: what to do instead.
    """

    library: str
    way: str


def with_hints(cls: ClassT) -> ClassT:
    """Decorates a class whose users may look for the names under its own in the table."""

    def __getattr__(self: object, name: str) -> NoReturn:
        raise missing(self, name)

    cls.__getattr__ = __getattr__  # type: ignore[attr-defined]
    return cls


def missing(thing: object, name: str) -> AttributeError:
    """Returns the error of an attribute that an object lacks, with the signpost, if there is one.

    For a class with a ``__getattr__`` of its own; others are decorated by ``with_hints``.
    """
    kind = type(thing)
    sign = find((base.__name__ for base in kind.__mro__), name)
    if sign is None:
        text = f"{kind.__name__!r} object has no attribute {name!r}"
        return AttributeError(text, name=name, obj=thing)
    return AttributeError(f"a {kind.__name__} has no {_format(name, sign)}")


def call_with_hints(cls: ClassT) -> ClassT:
    """Decorates a class as ``with_hints``, and looks at what it is made with.

    A keyword of the table, and a positional argument that is for a keyword, are a TypeError.
    """
    signposted_init(cls)
    return with_hints(cls)


def signposted_init(cls: ClassT) -> ClassT:
    """Decorates a class that has a ``__getattr__`` of its own as ``call_with_hints``."""
    place = cls.__name__
    init: Callable[..., None] = cls.__init__  # type: ignore[misc]
    known = frozenset(inspect.signature(init).parameters)
    places = [f"{base.__name__}()" for base in cls.__mro__]

    @wraps(init)
    def __init__(self: object, *args: Any, **kwargs: Any) -> None:
        _check_keywords(place, places, known, kwargs)
        for name, value in _misplaced(args):
            if name in known:
                kind = type(value).__name__
                raise TypeError(f"{place}() takes a {kind} by its name; pass {name}=")
            if not isinstance(value, dict):
                _check_keywords(place, places, known, (name,))
        init(self, *args, **kwargs)

    cls.__init__ = __init__  # type: ignore[misc]
    return cls


def signposted_keywords(place: str) -> Callable[[FunctionT], FunctionT]:
    """Decorates a function whose callers may give keywords that are under ``place`` in the table.

    It costs a call for each call: not for what every step calls.
    """

    def decorate(function: FunctionT) -> FunctionT:
        known = frozenset(inspect.signature(function).parameters)

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            _check_keywords(place, [f"{place}()"], known, kwargs)
            return function(*args, **kwargs)

        return call  # type: ignore[return-value]

    return decorate


def names_of(module: str, lazy: Collection[str] = ()) -> Callable[[str], ModuleType]:
    """Returns the ``__getattr__`` of a module whose users may look for foreign names.

    Args:
        lazy: modules inside it, which are imported when they are first asked for.
    """

    def __getattr__(name: str) -> ModuleType:
        if name in lazy:
            return import_module(f"{module}.{name}")
        sign = find([module], name)
        if sign is None:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        text = f"{module} has no {_format(name, sign)}"
        # `from mirror import name` would put an error without the text in place of this one.
        frame = sys._getframe(1)
        if frame.f_lasti >= 0 and frame.f_code.co_code[frame.f_lasti] == _IMPORT_FROM:
            raise ImportError(text, name=module)
        raise AttributeError(text)

    return __getattr__


def find(places: Iterable[str], name: str) -> Hint | None:
    """Returns what the first of these places says of a name; ``None``: no library has it."""
    if name.startswith("_"):
        return None
    known = table()
    return next((known[place][name] for place in places if name in known.get(place, ())), None)


@cache
def table() -> Mapping[str, Mapping[str, Hint]]:
    """Returns all signposts: by place, see ``migration_hints.txt``, and by name."""
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
    _, *parts = _SECTION.split(text)  # title and body, in turns
    for title, body in zip(parts[::2], parts[1::2], strict=True):
        yield title, [(" ".join(a.split()), " ".join(b.split())) for a, b in _ENTRY.findall(body)]


def _check_keywords(
    place: str, places: Iterable[str], known: Collection[str], names: Iterable[str]
) -> None:
    """Raises TypeError for a keyword that is not known here, and of which the table tells."""
    for name in names:
        if name not in known:
            sign = find(places, name)
            if sign is not None:
                raise TypeError(f"{place}() takes no {_format(name, sign)}")


def _misplaced(args: Iterable[object]) -> Iterator[tuple[str, object]]:
    """Yields the positional arguments that are for a keyword, with its name."""
    for value in args:
        for base in type(value).__mro__:
            if base.__name__ in _KEYWORDS:
                yield _KEYWORDS[base.__name__], value
                break


def _format(name: str, sign: Hint) -> str:
    return f"{name!r} ({sign.library}); {sign.way}"
