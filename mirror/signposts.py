"""Signposts: what is said where a name or keyword of another library is used.

Whoever comes from TensorFlow, DistributedDataParallel, Fabric, Accelerate or Horovod writes names
that mirror does not have. They are an AttributeError or a TypeError, as any unknown name is (so
``hasattr`` says no), with a text that says what to write here. ``signposts.txt`` holds them all,
and is read when the first name is missing: what is there costs nothing.
"""

from __future__ import annotations

import dis
import inspect
import re
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cache, wraps
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn, TypeVar

ClassT = TypeVar("ClassT", bound=type)

_FILE = Path(__file__).with_suffix(".txt")
_SECTION = re.compile(r"^\[(.+)\]$", re.MULTILINE)
_ENTRY = re.compile(r"^(\S.*(?:\n  \S.*)*)\n((?:    .*\n)+)", re.MULTILINE)
_IMPORT_FROM = dis.opmap["IMPORT_FROM"]


@dataclass(frozen=True)
class Signpost:
    """What is said of one name.

    Attributes:
        library: whose name it is.
        way: what to do instead.
    """

    library: str
    way: str


def signposted(cls: ClassT) -> ClassT:
    """Decorates a class whose users may look for the names under its own in the table."""

    def __getattr__(self: object, name: str) -> NoReturn:
        kind = type(self).__name__
        sign = find(cls.__name__, name)
        if sign is None:
            text = f"{kind!r} object has no attribute {name!r}"
            raise AttributeError(text, name=name, obj=self)
        raise AttributeError(f"a {kind} has no {_said(name, sign)}")

    cls.__getattr__ = __getattr__  # type: ignore[attr-defined]
    return cls


def signposted_call(cls: ClassT) -> ClassT:
    """Decorates such a class that users make, maybe with keywords of the table."""
    place = cls.__name__
    init: Callable[..., None] = cls.__init__  # type: ignore[misc]
    known = frozenset(inspect.signature(init).parameters)

    @wraps(init)
    def __init__(self: object, *args: Any, **kwargs: Any) -> None:
        for name in kwargs:
            if name not in known:
                sign = find(f"{place}()", name)
                if sign is not None:
                    raise TypeError(f"{place}() takes no {_said(name, sign)}")
        init(self, *args, **kwargs)

    cls.__init__ = __init__  # type: ignore[misc]
    return signposted(cls)


def names_of(module: str, lazy: Collection[str] = ()) -> Callable[[str], ModuleType]:
    """Returns the ``__getattr__`` of a module whose users may look for foreign names.

    Args:
        lazy: modules inside it, which are imported when they are first asked for.
    """

    def __getattr__(name: str) -> ModuleType:
        if name in lazy:
            return import_module(f"{module}.{name}")
        sign = find(module, name)
        if sign is None:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        text = f"{module} has no {_said(name, sign)}"
        # `from mirror import name` would put an error without the text in place of this one.
        frame = sys._getframe(1)
        if frame.f_lasti >= 0 and frame.f_code.co_code[frame.f_lasti] == _IMPORT_FROM:
            raise ImportError(text, name=module)
        raise AttributeError(text)

    return __getattr__


def find(place: str, name: str) -> Signpost | None:
    """Returns what is to be said of a name; ``None`` for one that nobody has."""
    return None if name.startswith("_") else table().get(place, {}).get(name)


@cache
def table() -> Mapping[str, Mapping[str, Signpost]]:
    """Returns all signposts: by place, see ``signposts.txt``, and by name."""
    text = _FILE.read_text(encoding="ascii")
    _, *parts = _SECTION.split(text)  # title and body, in turns
    sections = {
        title: {" ".join(a.split()): " ".join(b.split()) for a, b in _ENTRY.findall(body)}
        for title, body in zip(parts[::2], parts[1::2], strict=True)
    }
    phrases = sections.pop("phrases")
    return {
        title: {
            name: Signpost(head.partition(": ")[0], way.format_map(phrases))
            for head, way in entries.items()
            for name in head.partition(": ")[2].split()
        }
        for title, entries in sections.items()
    }


def _said(name: str, sign: Signpost) -> str:
    return f"{name!r} ({sign.library}); {sign.way}"
