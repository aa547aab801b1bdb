"""PerReplica and its weights; functions that map, select from and regroup nested values.

At the end: which values are numbers as arguments, Python's and NumPy's, and never a bool.
"""

from __future__ import annotations

import copy
import dataclasses
import numbers
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from functools import partial
from operator import is_
from typing import Any, Generic, NoReturn, TypeGuard, TypeVar

import numpy as np
import torch

from mirror.errors import StructureError, short_repr

__all__ = ["PerReplica"]

T = TypeVar("T")


class _Absent:
    """The placeholder in ``PerReplica.values`` for a replica without a part."""

    def __repr__(self) -> str:
        return "<no part>"

    def __reduce__(self) -> str:
        return "ABSENT"


ABSENT = _Absent()


# Functions that give the same result on parts as on the whole, on any dimension of examples.
_PARTWISE = frozenset(
    "detach detach_ clone contiguous to cpu cuda pin_memory type type_as requires_grad_ zero_ "
    "bfloat16 half float double bool char byte short int long zeros_like ones_like".split()
)


class PerReplica(Generic[T]):
    """One value per replica, as ``strategy.run`` returns and takes them.

    Some functions of tensors work on every part and return a PerReplica: ``detach``, ``clone``,
    ``contiguous``, ``to``, ``cpu``, ``cuda``, ``pin_memory``, ``float`` and the other dtypes,
    ``type_as``, ``requires_grad_``, ``zero_``, ``data``, ``torch.zeros_like``, ``ones_like``.
    Any other member of a tensor raises a TypeError that names ``run``, ``reduce`` and ``gather``.

    Attributes:
        values: one entry per replica, in replica order. The entry of a replica without a part (in
            a batch with fewer examples than replicas) is a placeholder, which
            ``strategy.local_results`` omits.
        weights: the replicas' weights in a mean: the number of examples of each part of a
            distributed batch, or each replica's ``ReplicaContext.weight`` in the run that
            returned the value; ``None`` for equal weights.
    """

    __slots__ = ("__weakref__", "_is_output", "values", "weights")
    __hash__ = object.__hash__

    def __init__(self, values: Iterable[T], *, weights: Sequence[float] | None = None) -> None:
        try:
            self.values: tuple[T, ...] = tuple(values)
        except TypeError:
            if isinstance(values, Iterable):
                raise
            raise TypeError(
                "the values of a PerReplica are a sequence, one per replica; got "
                f"{short_repr(values)}; pass [value] * strategy.num_replicas_in_sync for one "
                "value everywhere"
            ) from None
        self.weights = weights if weights is None or isinstance(weights, tuple) else tuple(weights)
        self._is_output = False  # a split call has returned it, since it could not join the parts
        if self.weights is not None and len(self.weights) != len(self.values):
            raise StructureError(
                f"PerReplica needs one weight per value; got {len(self.weights)} weights for "
                f"{len(self.values)} values"
            )

    def parts(self) -> Iterator[tuple[int, T]]:
        """Yields ``(replica_id, value)`` for each replica that has a part."""
        return ((i, v) for i, v in enumerate(self.values) if v is not ABSENT)

    def _mark_split_call(self, is_output: bool) -> PerReplica[T]:
        """Records whether a split call has returned this value, for errors."""
        self._is_output = is_output
        return self

    def __repr__(self) -> str:
        parts = ", ".join(f"{i}: {value!r}" for i, value in enumerate(self.values))
        return f"PerReplica({{{parts}}})"

    def _map_parts(self, name: str, fn: Callable[..., Any], *others: Any) -> PerReplica[Any]:
        """Returns ``fn`` of every part and of its part of ``others``.

        Returns itself if ``fn`` returns every part itself.
        """
        values = list[Any](self.values)
        for i, part in self.parts():
            if not isinstance(part, torch.Tensor):
                self._refuse(name)
            own = [other.values[i] if isinstance(other, PerReplica) else other for other in others]
            values[i] = fn(part, *own)
        if are_identical(values, self.values):
            return self
        return PerReplica(values, weights=self.weights)._mark_split_call(self._is_output)

    def __getattr__(self, name: str) -> Any:
        if name == "data":
            return self._map_parts(".data", lambda part: part.data)
        if name in _PARTWISE and hasattr(torch.Tensor, name):

            def method(*args: Any, **kwargs: Any) -> PerReplica[Any]:
                call = partial(_call_method, name, kwargs)
                return self._map_parts(f".{name}", call, *args)

            return method
        if not name.startswith("__") and hasattr(torch.Tensor, name):
            self._refuse(f".{name}")
        origin = "" if name in self.__slots__ else self._origin()  # slots are unset in unpickling
        raise AttributeError(f"'PerReplica' object has no attribute {name!r}{origin}")

    def __format__(self, spec: str) -> str:
        if not spec:
            return repr(self)
        parts = ", ".join(f"{i}: {_format_part(value, spec)}" for i, value in self.parts())
        return f"PerReplica({{{parts}}})"

    def __eq__(self, other: object) -> bool:
        if isinstance(other, torch.Tensor) or is_number(other):
            self._refuse("__eq__")
        return self is other

    def _refuse(self, what: str) -> NoReturn:
        remedy = ""
        if what == "__iter__":  # def repackage(h): h.detach() if isinstance(h, Tensor) else ...
            remedy = (
                "; it is not a torch.Tensor, so where isinstance(h, torch.Tensor) chooses between "
                "a tensor and a tuple, write isinstance(h, (torch.Tensor, mirror.PerReplica))"
            )
        raise TypeError(
            f"a PerReplica holds one value per replica and has no {what} of its own in the "
            "cross-replica context; pass it to strategy.run(fn, args=(value,)) to work on each "
            "part, combine the parts with strategy.reduce('sum' or 'mean', value) or "
            "strategy.gather(value, axis), or take them as a tuple with "
            "strategy.local_results(value); only functions of every part, such as .detach(), "
            f".clone(), .to(...) and .float(), can be called directly{remedy}{self._origin()}"
        )

    def _origin(self) -> str:
        """Returns, for errors, why there are parts where the user expects one value."""
        if not self._is_output:
            return ""
        kinds = [
            f"a tensor of shape {tuple(part.shape)}"
            if isinstance(part, torch.Tensor)
            else f"{part!r:.60}"
            for _, part in self.parts()
        ]
        sizes = [int(weight) for weight in self.weights or () if weight]
        return (
            f". A split call has returned it: its replicas had {sizes} examples and returned "
            f"{', '.join(kinds)}: only tensors with the examples as their first dimension, 0-d "
            "floating ones and equal values are joined; return it with the examples first, join "
            "it along their dimension with strategy.gather(value, axis), or pass it to the next "
            "split call, where each replica gets its part"
        )

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: dict[str, object] | None = None,
    ) -> PerReplica[Any]:
        name = getattr(func, "__name__", repr(func))
        if name in _PARTWISE and args and isinstance(args[0], PerReplica):
            return args[0]._map_parts(name, partial(func, **(kwargs or {})), *args[1:])
        values = [*args, *(kwargs or {}).values()]
        operand = next((v for v in values if isinstance(v, PerReplica)), PerReplica(()))
        operand._refuse(name)


def _call_method(name: str, kwargs: dict[str, Any], tensor: torch.Tensor, *args: Any) -> Any:
    return getattr(tensor, name)(*args, **kwargs)


def _format_part(value: Any, spec: str) -> str:
    """Returns a part as an f-string shows it; ``repr`` where it cannot follow the format."""
    if isinstance(value, torch.Tensor) and value.dim():
        return repr(value)
    return format(value, spec)


def _make_refusing_method(name: str) -> Callable[..., NoReturn]:
    def method(self: PerReplica[object], *args: object, **kwargs: object) -> NoReturn:
        self._refuse(name)

    method.__name__ = name
    return method


for _name in (
    "add radd iadd sub rsub isub mul rmul imul matmul rmatmul imatmul truediv rtruediv itruediv "
    "floordiv rfloordiv mod rmod pow rpow neg pos abs invert and rand or ror xor rxor lt le gt ge "
    "divmod rdivmod float int complex bool index len iter getitem setitem contains array round"
).split():
    setattr(PerReplica, f"__{_name}__", _make_refusing_method(f"__{_name}__"))


class ExampleCounts(tuple[float, ...]):
    """Replicas' weights that are their numbers of examples, from a batch that was split."""


class GivenWeights(tuple[float, ...]):
    """Replicas' weights that a program has set.

    Attributes:
        counts: the replicas' numbers of examples; ``None`` if these are not known.
    """

    counts: tuple[float, ...] | None = None

    @classmethod
    def for_counts(cls, weights: Iterable[float], counts: Sequence[float] | None) -> GivenWeights:
        """Returns weights for replicas with these numbers of examples."""
        given = cls(weights)
        given.counts = None if counts is None else tuple(counts)
        return given


def counts_of(weights: Sequence[float]) -> Sequence[float] | None:
    """Returns the numbers of examples behind weights; ``None`` if these are not known."""
    if isinstance(weights, GivenWeights):
        return weights.counts
    return weights if isinstance(weights, ExampleCounts) else None


# Usual types of leaves, for a fast path: every step walks its arguments and results.
_LEAVES = frozenset({torch.Tensor, PerReplica, type(None), bool, int, float, str})


def is_number(value: object) -> bool:
    """Returns whether ``value`` is a Python or NumPy number or a NumPy array."""
    return isinstance(value, (numbers.Number, np.generic, np.ndarray))


def are_identical(some: Sequence[object], others: Sequence[object]) -> bool:
    """Returns whether two sequences have identical objects in the same order; 20 ns an object."""
    return len(some) == len(others) and all(map(is_, some, others))


def map_structure(fn: Callable[..., object], tree: Any, *others: Any) -> Any:
    """Returns the structure with ``fn`` of the corresponding leaves of all trees.

    Inner nodes are tuples, namedtuples, lists, mappings and dataclasses, which keep their
    classes; any other value, ``torch.Size`` included, is a leaf.

    Raises:
        StructureError: the trees differ in type, length, keys or fields.
    """
    kind = type(tree)
    if kind in _LEAVES:
        for other in others:
            if type(other) is not kind:
                _check_leaf(tree, other)
        return fn(tree, *others)
    if kind is tuple or kind is list:
        if not others:
            return kind([map_structure(fn, child) for child in tree])
        if {*map(type, others)} == {kind} and {*map(len, others)} == {len(tree)}:
            rows = zip(tree, *others, strict=True)
            return kind([map_structure(fn, *children) for children in rows])
    elif kind is dict:
        if not others:
            return {key: map_structure(fn, child) for key, child in tree.items()}
        keys = tree.keys()
        if {*map(type, others)} == {dict} and False not in [keys == o.keys() for o in others]:
            return {
                key: map_structure(fn, child, *[other[key] for other in others])
                for key, child in tree.items()
            }
    children = None if isinstance(tree, (torch.Tensor, PerReplica)) else children_of(tree)
    if children is None:
        for other in others:
            _check_leaf(tree, other)
        return fn(tree, *others)
    for other in others:
        _check_same_structure(tree, other, children)
    mapped = {
        key: map_structure(fn, child, *(_child(other, key) for other in others))
        for key, child in children.items()
    }
    return rebuild_node(tree, mapped)


def leaves_of(tree: Any) -> list[Any]:
    """Returns the leaves of ``tree`` in the order ``map_structure`` visits them."""
    if type(tree) is tuple and _LEAVES.issuperset(map(type, tree)):  # as arguments mostly are
        return list(tree)
    leaves: list[Any] = []
    map_structure(leaves.append, tree)
    return leaves


def rebuild_structure(tree: Any, leaves: Iterable[Any]) -> Any:
    """Returns ``tree`` with its leaves replaced, in the order of ``leaves_of``."""
    remaining = iter(leaves)
    return map_structure(lambda _: next(remaining), tree)


def describe_structure(tree: Any) -> str:
    """Returns a description of the structure of ``tree``, with ``*`` for a leaf."""
    children = None if isinstance(tree, (torch.Tensor, PerReplica)) else children_of(tree)
    if children is None:
        return "*"
    inner = ", ".join(f"{key}: {describe_structure(child)}" for key, child in children.items())
    return f"{type(tree).__name__}({inner})"


def select(tree: Any, replica_id: int) -> Any:
    """Returns ``tree`` with every PerReplica replaced by the part of one replica."""
    if isinstance(tree, PerReplica):
        return tree.values[replica_id]
    if type(tree) is tuple and _LEAVES.issuperset(map(type, tree)):  # the usual arguments
        parts = [*tree]  # a loop, since a comprehension is a call before Python 3.12
        for i, value in enumerate(tree):
            if type(value) is PerReplica:
                parts[i] = value.values[replica_id]
        return tuple(parts)
    return map_structure(
        lambda leaf: leaf.values[replica_id] if isinstance(leaf, PerReplica) else leaf, tree
    )


def join_values(values: Iterable[Any]) -> Any:
    """Returns one PerReplica for each leaf of the replicas' values.

    Raises:
        StructureError: the values differ in structure.
    """
    return map_structure(lambda *parts: PerReplica(parts), *values)


def children_of(tree: Any) -> dict[Any, Any] | None:
    """Returns the children of an inner node by key, or ``None`` for a leaf."""
    if isinstance(tree, (list, tuple)):
        return None if isinstance(tree, torch.Size) else dict(enumerate(tree))
    if dataclasses.is_dataclass(tree) and not isinstance(tree, (type, torch.nn.Module)):
        names = dict.fromkeys(f.name for f in dataclasses.fields(tree))
        names.update(dict.fromkeys(getattr(tree, "__dict__", ())))  # attributes of __post_init__
        return {name: getattr(tree, name) for name in names if hasattr(tree, name)}
    if isinstance(tree, MutableMapping):
        return dict(tree)
    return None


def _child(tree: Any, key: Any) -> Any:
    return getattr(tree, key) if dataclasses.is_dataclass(tree) else tree[key]


def _check_leaf(leaf: Any, other: Any) -> None:
    if not isinstance(other, (torch.Tensor, PerReplica)) and children_of(other) is not None:
        raise StructureError(f"a {type(leaf).__name__} here, a {type(other).__name__} there")


def _check_same_structure(tree: Any, other: Any, children: dict[Any, Any]) -> None:
    if type(tree) is not type(other):
        raise StructureError(f"a {type(tree).__name__} here, a {type(other).__name__} there")
    keys = (children_of(other) or {}).keys()
    if children.keys() != keys:
        raise StructureError(
            f"a {type(tree).__name__} with {list(children)} here, with {list(keys)} there"
        )


def rebuild_node(tree: Any, mapped: dict[Any, Any]) -> Any:
    """Returns an inner node like ``tree`` with other children."""
    kind = type(tree)
    if kind is list:
        return list(mapped.values())
    if kind is tuple:
        return tuple(mapped.values())
    if isinstance(tree, tuple):
        return kind._make(mapped.values()) if hasattr(kind, "_make") else kind(mapped.values())
    if isinstance(tree, list):
        return kind(mapped.values())
    if kind is dict:
        return mapped
    has_own = hasattr(kind, "__copy__") and kind.__new__ is object.__new__  # type: ignore[comparison-overlap]
    has_own = has_own and dataclasses.is_dataclass(tree)
    rebuilt = object.__new__(kind) if has_own else copy.copy(tree)
    for key, value in mapped.items():
        if not dataclasses.is_dataclass(tree):
            rebuilt[key] = value
        elif kind.__dataclass_params__.frozen:
            object.__setattr__(rebuilt, key, value)
        else:
            setattr(rebuilt, key, value)
    return rebuilt


def is_int(value: object) -> TypeGuard[int]:
    """Returns whether a value is an integer, also one of NumPy, and not a bool."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_real(value: object) -> TypeGuard[float]:
    """Returns whether a value is a real number, also one of NumPy, and not a bool."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def check_timeout(seconds: object) -> None:
    """Raises ValueError unless ``timeout_seconds`` is a number from 0 on, or None."""
    # ``not >=`` is true for NaN, too. Numbers of NumPy return bools of NumPy.
    if seconds is not None and not (is_real(seconds) and float(seconds) >= 0):
        raise ValueError(
            f"timeout_seconds must be a number >= 0 or None, got {short_repr(seconds)}; None has "
            "no limit, or that of the backend"
        )
