"""Checks and splits the arguments of a run, and regroups its results."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from mirror.errors import StructureError
from mirror.values import ABSENT, PerReplica, is_number, leaves_of, map_structure, select

_NOT_RUN_BY_A_CALL = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def check_call(fn: Any, args: Any, kwargs: Any) -> None:
    """Raises TypeError if ``run`` cannot call ``fn`` with these arguments once per replica."""
    if not callable(fn):
        raise TypeError(
            f"run takes a function, which it calls on every replica, got a {type(fn).__name__}; "
            "pass the function itself and its arguments: strategy.run(step, args=(batch,))"
        )
    if type(args) is not tuple and not isinstance(args, (tuple, list)):
        raise TypeError(
            f"args must be a tuple or a list, got a {type(args).__name__}; one argument is "
            "args=(batch,)"
        )
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise TypeError(f"kwargs must be a mapping of names, got a {type(kwargs).__name__}")
    code = getattr(fn, "__code__", None)
    flags = 0 if code is None else code.co_flags
    if flags & _NOT_RUN_BY_A_CALL:
        kind = "a generator" if flags & inspect.CO_GENERATOR else "an async"
        raise TypeError(
            f"run calls an ordinary function on every replica; {fn.__name__} is {kind} function, "
            "and its call executes nothing; return the values from an ordinary function"
        )


def find_active(num_replicas: int, *trees: Any) -> tuple[Sequence[int], Sequence[float] | None]:
    """Returns the replicas that have a part of every PerReplica, and the weights of all replicas.

    Raises:
        StructureError: a PerReplica has a wrong number of parts, or no replica has a part of each.
    """
    leaves: list[Any] = []
    for tree in trees:
        if tree:
            leaves += leaves_of(tree)
    if not leaves:
        return range(num_replicas), None
    values = check_parts(num_replicas, leaves)
    active = replicas_with_parts(values)
    if active is None:
        return range(num_replicas), None
    if not active:
        raise StructureError("no replica has a part of every PerReplica argument of run")
    for value in values:
        if value.weights is not None:
            return active, value.weights
    return active, None


def make_call(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[[int], Any]:
    """Returns a function that calls ``fn`` as one replica, with its parts of the arguments."""

    def call(replica_id: int) -> Any:
        own_kwargs = select(kwargs, replica_id) if kwargs else {}
        own_args = select(args, replica_id) if args else ()
        return fn(*own_args, **own_kwargs)

    return call


def check_parts(num_replicas: int, leaves: Iterable[Any]) -> list[PerReplica[Any]]:
    """Returns the PerReplica values among leaves.

    Raises:
        StructureError: a PerReplica has a wrong number of parts.
    """
    values: list[PerReplica[Any]] = []
    for value in leaves:
        if not isinstance(value, PerReplica):
            continue
        values.append(value)
        if len(value.values) != num_replicas:
            got = f"with {len(value.values)}" if value.values else "without parts"
            raise StructureError(
                f"a PerReplica of this strategy has {num_replicas} parts, one per replica; got "
                f"one {got}"
            )
    return values


def replicas_with_parts(values: Iterable[PerReplica[Any]]) -> list[int] | None:
    """Returns the replicas that have a part in all of ``values``; ``None`` without any values."""
    ids: list[int] | None = None
    for value in values:
        parts = value.values
        here = [*range(len(parts))]
        if type(ABSENT) in map(type, parts):
            here = [i for i, part in enumerate(parts) if part is not ABSENT]
        ids = here if ids in (None, here) else [i for i in ids or () if i in here]
    return ids


def regroup(
    results: dict[int, Any], num_replicas: int, weights: Sequence[float] | None = None
) -> Any:
    """Joins the results of replicas into one structure with PerReplica leaves.

    Tensors and numbers always become PerReplica; another leaf is unchanged if all replicas
    returned the same object.

    Args:
        results: the results of the active replicas, by replica.

    Raises:
        StructureError: the results differ in structure.
    """

    def join_leaves(*leaves: Any) -> Any:
        first = leaves[0]
        if not isinstance(first, torch.Tensor) and not is_number(first):
            if all(leaf is first for leaf in leaves):
                return first
        values: list[Any] = [ABSENT] * num_replicas
        for replica_id, leaf in zip(results, leaves, strict=True):
            values[replica_id] = leaf
        return PerReplica(values, weights=weights)

    try:
        return map_structure(join_leaves, *results.values())
    except StructureError as error:
        names = ", ".join(map(str, results))
        raise StructureError(
            f"the replicas {names} returned different structures, {error}; return the same "
            "structure from every replica; lists of examples: strategy.local_results(batch)"
        ) from None


def local_results(value: Any) -> tuple[Any, ...]:
    """Returns one entry per replica that has a part, in replica order.

    A structure becomes a tuple of structures, a value that is not distributed a 1-tuple.
    """
    ids = replicas_with_parts(leaf for leaf in leaves_of(value) if isinstance(leaf, PerReplica))
    return (value,) if ids is None else tuple(select(value, i) for i in ids)
