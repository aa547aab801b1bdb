"""Joins the replicas' changes of a split call's arguments into the caller's objects.

    in an argument                                 the caller's object gets
    a batched tensor                               each replica's rows
    a small tensor that is not batched             the value, if it is equal on all replicas
    a list that has grown by as many as examples   the new entries, one replica after the other
    a list that has grown by equally many          the new entries, each joined like an output
    a dict or object                               entries joined by key; also a key of one replica
    a set                                          elements that any replica added, without
                                                   elements that any replica removed

All changes are joined before the first is written. A change that cannot be joined raises
``StrategyError`` and leaves the caller's objects as they were.
See [Note: Arguments that forward changes] in ``scatter.py``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from mirror.base.containers import (
    assign,
    contents_of,
    is_held,
    is_in,
    is_same,
    snapshot,
)
from mirror.errors import StrategyError
from mirror.execution.runner import Runner
from mirror.replica.scatter_gather.gather import Gatherer
from mirror.replica.scatter_gather.scatter import ReplicaArgs
from mirror.values import PerReplica


def take_changes(
    runner: Runner,
    parts: Sequence[ReplicaArgs],
    ids: Sequence[int],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Joins what the replicas of a split call have changed into the caller's arguments.

    Args:
        ids: the replicas that ran.

    Raises:
        StrategyError: see ``join_changes``.
    """
    for part in parts:
        if part.given or part.tensors or part.shared:
            joiner = Gatherer(runner, parts[0].split.sizes, ids, parts)
            join_changes(parts, joiner, lambda value: _name_of(value, args, kwargs))
            return


def _name_of(value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Returns the name of the argument that is, or holds, a value."""
    for name, argument in (*enumerate(args), *kwargs.items()):
        if is_in(value, argument):
            inside = "" if argument is value else f", a {type(value).__name__} in it"
            return f"argument {name!r} ({type(argument).__name__}{inside})"
    return f"an argument ({type(value).__name__})"


def join_changes(
    parts: Sequence[ReplicaArgs], gatherer: Gatherer, where: Callable[[Any], str]
) -> None:
    """Writes the replicas' changes into the objects that the caller passed.

    Args:
        parts: the arguments of the replicas that ran.
        where: returns the name of the argument that holds an object, for errors.

    Raises:
        StrategyError: the changes cannot be joined, or concern an object that all replicas share.
    """
    for value, held in parts[0].shared:
        if not is_held(snapshot(value), held):
            _refuse(
                where(value),
                f"an object ({type(value).__name__}) that all replicas share, once by each",
            )
    writes = _collect_writes(parts, gatherer, where)
    fills = []
    for i, (value, _, _) in enumerate(parts[0].given):
        now = [contents_of(part.given[i][1]) for part in parts]
        handed = [part.given[i][2] for part in parts]
        if not all(map(is_held, now, handed)):
            fills.append((value, _merge_contents(value, now, handed, gatherer, where)))
    for write in writes:
        write()
    for value, contents in fills:
        assign(value, contents)


def _collect_writes(
    parts: Sequence[ReplicaArgs], gatherer: Gatherer, where: Callable[[Any], str]
) -> list[Callable[[], object]]:
    """Returns functions that write the tensors that replicas have changed in place."""
    writes: list[Callable[[], object]] = []
    changed: dict[int, Tensor] = {}
    for part in parts:
        for tensor, own, version, node in part.tensors:
            if own._version == version:
                continue
            if own is tensor and len(parts) > 1:
                shape = tuple(tensor.shape)
                _refuse(where(tensor), f"in place a tensor of shape {shape} that all share")
            elif own is not tensor and part.split.is_batched(tensor):
                writes.append(partial(_write_rows, part, tensor, own, own.grad_fn is not node))
            elif own is not tensor:
                changed[id(tensor)] = tensor
    for tensor in changed.values():
        value = gatherer.merge_unbatched([part.own[id(tensor)][1] for part in parts])
        if value is None:
            shape = tuple(tensor.shape)
            _refuse(where(tensor), f"in place a tensor of shape {shape}, differently on each")
        writes.append(partial(tensor.copy_, value))
    return writes


def _write_rows(part: ReplicaArgs, tensor: Tensor, own: Tensor, is_in_graph: bool) -> None:
    """Writes a replica's rows into the caller's tensor, whose version and graph show it.

    Args:
        is_in_graph: whether autograd has recorded what the replica did.
    """
    with torch.set_grad_enabled(is_in_graph and torch.is_grad_enabled()):
        part.split.rows(tensor, part.replica_id).copy_(own)


def _merge_contents(
    value: Any,
    now: Sequence[dict[Any, Any]],
    handed: Sequence[dict[Any, Any]],
    gatherer: Gatherer,
    where: Callable[[Any], str],
) -> dict[Any, Any]:
    """Returns the new contents of the caller's object."""
    before = contents_of(value)
    both = list(zip(now, handed, strict=True))
    if isinstance(value, set):
        added = set[Any]().union(*(one.keys() - was.keys() for one, was in both))
        removed = set[Any]().union(*(was.keys() - one.keys() for one, was in both))
        return dict.fromkeys((before.keys() - removed) | added)
    if isinstance(value, (list, deque)):
        return _sequence(value, now, handed, gatherer, where)
    contents = dict[Any, Any]()
    for key, child in before.items():
        present = [one[key] for one in now if key in one]
        if len(present) == len(now):
            contents[key] = _entry(key, child, present, handed, gatherer)
        elif any(key in one and one[key] is not was[key] for one, was in both):
            _refuse(where(value), f"entry {key!r}, on some replicas, and removed it on others")
    for one in now:
        for key in one:
            if key not in before and key not in contents:
                have = [i for i, other in enumerate(now) if key in other]
                contents[key] = gatherer.gather_some(have, [now[i][key] for i in have])
    if not any(isinstance(child, Tensor) for one in now for child in one.values()):
        _keep_counts_per_replica(contents, before, now, gatherer)
    return contents


def _keep_counts_per_replica(
    contents: dict[Any, Any],
    before: dict[Any, Any],
    now: Sequence[dict[Any, Any]],
    gatherer: Gatherer,
) -> None:
    """Makes a number a PerReplica if it has grown by each replica's number of examples.

    Such a number counts examples, so one replica's value is not the whole batch's. In an object
    with tensors it is a position in a cache, and stays.
    """
    for key, value in contents.items():
        old = before.get(key, 0)
        if type(value) is int and type(old) is int and value != old and len(now) > 1:
            if gatherer.are_sizes([one[key] - old for one in now if key in one]):
                contents[key] = gatherer.as_per_replica([one[key] for one in now])


def _entry(
    key: Any,
    child: Any,
    present: Sequence[Any],
    handed: Sequence[dict[Any, Any]],
    gatherer: Gatherer,
) -> Any:
    same = list(map(is_same, present, [was[key] for was in handed]))
    if all(same):
        return child
    if isinstance(child, PerReplica):
        return gatherer.as_per_replica(present)
    if any(same):  # only some replicas have changed it
        which = [i for i, is_same in enumerate(same) if not is_same]
        return gatherer.gather_some(which, [present[i] for i in which])
    return gatherer.entry(present, child)


def _sequence(
    value: Any,
    now: Sequence[dict[Any, Any]],
    handed: Sequence[dict[Any, Any]],
    gatherer: Gatherer,
    where: Callable[[Any], str],
) -> dict[Any, Any]:
    """Returns the new contents of a list, of which replicas' copies grew, shrank or changed."""
    before = contents_of(value)
    lists = [list(one.values()) for one in now]
    lengths, kept = [len(entries) for entries in lists], len(before)
    grown = [entries[kept:] for entries in lists]
    only_grown = min(lengths) >= kept and all(
        one[i] is was[i] for one, was in zip(now, handed, strict=True) for i in range(kept)
    )
    if only_grown and gatherer.are_per_example(grown):
        return dict(enumerate([*before.values(), *gatherer.concatenate(grown)]))
    if len(set(lengths)) > 1:
        _refuse(where(value), f"to lengths {lengths} that are not those of their examples")
    rows = [[one[i] for one in lists] for i in range(lengths[0])]
    entries = [_entry(i, before[i], row, handed, gatherer) for i, row in enumerate(rows[:kept])]
    added = [gatherer.join_added(row, len(rows) - kept) for row in rows[kept:]]
    if only_grown and gatherer.are_as_many_as_examples(grown):
        if any(isinstance(entry, PerReplica) for entry in added):
            added = gatherer.concatenate(grown)
    return dict(enumerate(entries + added))


def _refuse(where: str, what: str) -> NoReturn:
    raise StrategyError(
        f"a split call has changed {where}: {what}; changes of an argument are joined like "
        "outputs: tensors that have the examples as their first dimension are concatenated, "
        "0-d floating ones averaged, equal values stay; return the values instead, or call the "
        "module inside strategy.run, with an object for each replica"
    )
