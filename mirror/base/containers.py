"""Reads, copies and fills the contents of mutable values, of any kind.

    kind                               its contents
    list, tuple, deque                 by position
    dict, ModelOutput, other mappings  by key
    set                                by element
    a dataclass, another Python object its attributes, by name

An object is *data* if everything that can be reached from it only holds values: no module,
optimizer, lock, file or iterator. A class that defines how it is copied is not data, unless it is
a dataclass. Only data is copied; replicas share any other object.

Pytrees do not serve here: they flatten registered classes only, and forget which objects are the
same. A cache of an unregistered class, or one that two arguments hold, needs both.
"""

from __future__ import annotations

import copy
import dataclasses
import datetime
import decimal
import enum
import io
import logging
import pathlib
import re
import threading
import types
import weakref
from collections import deque
from collections.abc import Iterator, MutableMapping
from operator import eq
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mirror.values import ABSENT, PerReplica, are_identical, children_of, rebuild_node

# The most values that a search through an object visits; a larger object is not data.
_MOST_VALUES = 5000

IMMUTABLE = frozenset(
    {type(None), bool, int, float, complex, str, bytes, range, slice, frozenset, type(...)}
    | {torch.device, torch.dtype, torch.layout, torch.memory_format, torch.Size}
)
# Values that are never entered.
_LEAVES = (
    *(Tensor, np.ndarray, PerReplica),
    *(datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo, decimal.Decimal),
    *(type, enum.Enum, pathlib.PurePath, re.Pattern, np.generic, np.dtype, weakref.ref),
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType),
    *(torch.Generator, np.random.Generator, torch.Stream, torch.Event, property, type(ABSENT)),
)
_STRUCTURES = (list, tuple, set, frozenset, deque, MutableMapping)
# Classes that do more than hold values.
_OPAQUE: tuple[type, ...] = (
    *(nn.Module, torch.optim.Optimizer, io.IOBase, logging.Logger, threading.Thread),
    *(type(threading.Lock()), type(threading.RLock())),
)
_COPYING = ("__new__", "__copy__", "__deepcopy__", "__reduce__", "__reduce_ex__", "__getstate__")


def is_leaf(value: Any) -> bool:
    """Returns whether a value is passed as one, never entered: a tensor, number or function."""
    return type(value) in IMMUTABLE or isinstance(value, _LEAVES)


def is_object(value: Any) -> bool:
    """Returns whether a value is an object with attributes for contents."""
    if isinstance(value, _STRUCTURES):
        return False
    return not is_leaf(value) and _has_attributes(type(value))


def snapshot(value: Any) -> dict[Any, Any]:
    """Returns an object's attributes and their contents, to detect later changes."""
    if isinstance(value, _OPAQUE):
        return {}  # torch and the library change these while they work
    held = dict(contents_of(value))
    for name, child in contents_of(value).items():
        if isinstance(child, dict):
            held[name, "holds"] = (*child, *child.values())
        elif isinstance(child, (list, set, deque)):
            held[name, "holds"] = tuple(child)
        elif isinstance(child, Tensor) and not child.is_inference():
            held[name, "version"] = child._version
    return held


def is_held(now: dict[Any, Any], before: dict[Any, Any]) -> bool:
    """Returns whether two contents, or two results of ``snapshot``, have identical objects."""
    same = len(now) == len(before) and all(map(eq, now, before))
    return same and all(map(is_same, now.values(), before.values()))


def is_same(now: Any, before: Any) -> bool:
    """Returns whether two values are one object, equal ints, or tuples of identical objects."""
    if type(now) is tuple and type(before) is tuple:
        return are_identical(now, before)
    return now is before or (type(now) is type(before) is int and now == before)


def is_consumed(value: Any) -> bool:
    """Returns whether a value can be iterated only once: an iterator or a generator."""
    return isinstance(value, Iterator) and not isinstance(value, io.IOBase)


def is_data(value: Any) -> bool:
    """Returns whether an object, and everything that can be reached from it, only holds values."""
    seen, found = {id(value)}, deque([value])
    while found:  # breadth first: opaque objects are seldom deep
        value = found.popleft()
        if is_leaf(value):
            continue
        if len(seen) > _MOST_VALUES or _is_opaque(value):
            return False
        for child in contents_of(value).values():
            if type(child) not in IMMUTABLE and id(child) not in seen:
                seen.add(id(child))
                found.append(child)
    return True


def is_shared(value: Any) -> bool:
    """Returns whether all replicas share a value instead of getting copies.

    A dataclass is a container, like a dict: it is never shared, although its contents may be.
    """
    if isinstance(value, _STRUCTURES) or is_leaf(value):
        return False
    if not _has_attributes(type(value)):
        return True  # implemented in C: a lock, a file
    return not _is_container(value) and not is_data(value)


def leaves_in(value: Any, *, with_objects: bool = False) -> Iterator[Any]:
    """Yields the leaves of structures, dataclasses among them, in their order.

    Args:
        with_objects: whether to enter also the objects of which replicas get copies.
    """
    seen, found = set[int](), [value]
    while found:
        value = found.pop()
        kind = type(value)
        if kind is tuple and id(value) not in seen:  # a fast path for the usual containers
            seen.add(id(value))
            found += reversed(value)
        elif kind is dict and id(value) not in seen:
            seen.add(id(value))
            found += reversed(value.values())
        elif kind is Tensor or is_leaf(value):
            yield value
        elif id(value) not in seen:
            seen.add(id(value))
            is_entered = not is_object(value) or _is_container(value)
            if is_entered or (with_objects and not is_shared(value)):
                found += reversed(contents_of(value).values())


def is_in(value: Any, holder: Any) -> bool:
    """Returns whether an object is ``holder``, or can be reached from it."""
    seen, found = {id(holder)}, deque([holder])
    while found and len(seen) < _MOST_VALUES:
        holder = found.popleft()
        if holder is value:
            return True
        if not is_leaf(holder) and not _is_opaque(holder):
            new = [child for child in contents_of(holder).values() if id(child) not in seen]
            seen.update(map(id, new))
            found += new
    return False


def contents_of(value: Any) -> dict[Any, Any]:
    """Returns a value's contents by key; an empty dict for a leaf."""
    if isinstance(value, (set, frozenset)):
        return dict.fromkeys(value)
    if isinstance(value, deque):
        return dict(enumerate(value))
    if _is_structure(value):
        return children_of(value) or {}
    held: dict[Any, Any] = dict(getattr(value, "__dict__", ()))
    for name in _slots_of(type(value)):
        if hasattr(value, name):
            held[name] = getattr(value, name)
    return held


def empty_like(value: Any) -> Any:
    """Returns a new value of the same kind for ``assign`` to fill; not for tuples."""
    if isinstance(value, deque):
        return deque(maxlen=value.maxlen)
    if isinstance(value, (list, set, MutableMapping)) or _is_structure(value):
        return copy.copy(value)
    return object.__new__(type(value))


def assign(value: Any, contents: dict[Any, Any]) -> Any:
    """Replaces a value's contents; returns the value, or a new tuple for a tuple."""
    if isinstance(value, (list, deque)):
        value.clear()
        value.extend(contents.values())
    elif isinstance(value, set):
        value.clear()
        value.update(contents)
    elif isinstance(value, tuple):
        return rebuild_node(value, contents)
    elif _is_structure(value):
        present = children_of(value) or {}
        for key in present.keys() - contents.keys():
            del value[key]
        for key, held in contents.items():
            if dataclasses.is_dataclass(value):
                setattr(value, key, held)
            elif key not in present or present[key] is not held:
                value[key] = held
    else:
        for name in contents_of(value).keys() - contents.keys():
            object.__delattr__(value, name)
        for name, held in contents.items():
            _put(value, name, held)
    return value


def _is_structure(value: Any) -> bool:
    """Returns whether a value's contents are its entries; False for a plain dataclass."""
    return isinstance(value, (list, tuple, MutableMapping))


def _is_container(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not _is_opaque(value)


def _is_opaque(value: Any) -> bool:
    if isinstance(value, _OPAQUE) or is_consumed(value):
        return True
    if isinstance(value, _STRUCTURES):
        return False
    kind = type(value)
    if dataclasses.is_dataclass(kind):  # its fields are its contents, however it is copied
        return False
    return not _has_attributes(kind) or any(_is_own(kind, name) for name in _COPYING)


def _has_attributes(kind: type) -> bool:
    """Returns whether a class is defined in Python, so that attributes are its only state."""
    return bool(kind.__flags__ & 1 << 9) and (kind.__dictoffset__ != 0 or any(_slots_of(kind)))


def _is_own(kind: type, name: str) -> bool:
    """Returns whether a class defines ``name``; methods that dataclasses generate don't count."""
    defined = getattr(kind, name, None)
    if defined is None or defined is getattr(object, name, None):
        return False
    return getattr(defined, "__module__", "") != "dataclasses"


def _slots_of(kind: type) -> list[str]:
    names: list[str] = []
    for base in kind.__mro__:
        slots = base.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__"):
                mangled = name.startswith("__") and not name.endswith("__")
                names.append(f"_{base.__name__.lstrip('_')}{name}" if mangled else name)
    return names


def _put(value: Any, name: str, held: Any) -> None:
    attributes = getattr(value, "__dict__", None)
    if attributes is not None and name not in _slots_of(type(value)):
        attributes[name] = held
    else:
        object.__setattr__(value, name, held)
