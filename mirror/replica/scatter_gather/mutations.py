"""What replicas have changed in the arguments of a split call, joined into the caller's objects.

See [Note: Arguments that forward changes]. Everything is joined before anything is written, so
that a change that is refused leaves the caller's objects as they were.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

from torch import Tensor

from mirror.errors import StrategyError
from mirror.replica.scatter_gather.containers import (
    assign,
    contents_of,
    is_held,
    is_same,
    snapshot,
)
from mirror.replica.scatter_gather.gather import Gatherer
from mirror.replica.scatter_gather.scatter import ReplicaArgs
from mirror.values import PerReplica


def join_changes(
    parts: Sequence[ReplicaArgs], joiner: Gatherer, where: Callable[[Any], str]
) -> None:
    """Joins what the replicas have changed into the objects that the caller passed.

    Args:
        parts: of the replicas that ran.
        where: tells of which argument an object is, for errors.

    Raises:
        StrategyError: the changes cannot be joined, or are of what all replicas share.
    """
    for value, held in parts[0].shared:
        if not is_held(snapshot(value), held):
            _refuse(
                where(value),
                f"an object ({type(value).__name__}) that all replicas share, once by each",
            )
    writes = _written(parts, joiner, where)
    fills = []
    for i, (value, _, _) in enumerate(parts[0].given):
        now = [contents_of(part.given[i][1]) for part in parts]
        handed = [part.given[i][2] for part in parts]
        if not all(map(is_held, now, handed)):
            fills.append((value, _changed(value, now, handed, joiner, where)))
    for write in writes:
        write()
    for value, contents in fills:
        assign(value, contents)


def _written(
    parts: Sequence[ReplicaArgs], joiner: Gatherer, where: Callable[[Any], str]
) -> list[Callable[[], object]]:
    """Returns what writes the tensors that replicas have changed in place."""
    writes: list[Callable[[], object]] = []
    changed: dict[int, Tensor] = {}
    for part in parts:
        for tensor, own, version in part.tensors:
            if own._version == version:
                continue
            if own is tensor and len(parts) > 1:
                shape = tuple(tensor.shape)
                _refuse(where(tensor), f"in place a tensor of shape {shape} that all share")
            elif own is not tensor and part.split.is_batched(tensor):
                rows = part.split.rows(tensor, part.replica_id)
                writes.append(partial(rows.copy_, own))
            elif own is not tensor:
                changed[id(tensor)] = tensor
    for tensor in changed.values():
        value = joiner.merge_unbatched([part.own[id(tensor)][1] for part in parts])
        if value is None:
            shape = tuple(tensor.shape)
            _refuse(where(tensor), f"in place a tensor of shape {shape}, differently on each")
        writes.append(partial(tensor.copy_, value))
    return writes


def _changed(
    value: Any,
    now: Sequence[dict[Any, Any]],
    handed: Sequence[dict[Any, Any]],
    joiner: Gatherer,
    where: Callable[[Any], str],
) -> dict[Any, Any]:
    """Returns the contents that the caller's object is to have."""
    before = contents_of(value)
    both = list(zip(now, handed, strict=True))
    if isinstance(value, set):
        added = set[Any]().union(*(one.keys() - was.keys() for one, was in both))
        removed = set[Any]().union(*(was.keys() - one.keys() for one, was in both))
        return dict.fromkeys((before.keys() - removed) | added)
    if isinstance(value, (list, deque)):
        return _sequence(value, now, handed, joiner, where)
    contents = dict[Any, Any]()
    for key, child in before.items():
        present = [one[key] for one in now if key in one]
        if len(present) == len(now):
            contents[key] = _entry(key, child, present, handed, joiner)
        elif any(key in one and one[key] is not was[key] for one, was in both):
            _refuse(where(value), f"entry {key!r}, on some replicas, and removed it on others")
    for one in now:
        for key in one:
            if key not in before and key not in contents:
                have = [i for i, other in enumerate(now) if key in other]
                contents[key] = joiner.of_some(have, [now[i][key] for i in have])
    if not any(isinstance(child, Tensor) for one in now for child in one.values()):
        _leave_counts_apart(contents, before, now, joiner)
    return contents


def _leave_counts_apart(
    contents: dict[Any, Any],
    before: dict[Any, Any],
    now: Sequence[dict[Any, Any]],
    joiner: Gatherer,
) -> None:
    """Does not take a number for that of one device that has grown by the examples of each.

    It counts them, or equal parts say nothing. (Beside tensors it is a position: of a cache.)
    """
    for key, value in contents.items():
        old = before.get(key, 0)
        if type(value) is int and type(old) is int and value != old and len(now) > 1:
            if joiner.are_sizes([one[key] - old for one in now if key in one]):
                contents[key] = joiner.as_per_replica([one[key] for one in now])


def _entry(
    key: Any,
    child: Any,
    present: Sequence[Any],
    handed: Sequence[dict[Any, Any]],
    joiner: Gatherer,
) -> Any:
    same = list(map(is_same, present, [was[key] for was in handed]))
    if all(same):
        return child
    if isinstance(child, PerReplica):
        return joiner.as_per_replica(present)
    if any(same):  # some only, which has it for one of its examples
        which = [i for i, is_same in enumerate(same) if not is_same]
        return joiner.of_some(which, [present[i] for i in which])
    return joiner.entry(present, child)


def _sequence(
    value: Any,
    now: Sequence[dict[Any, Any]],
    handed: Sequence[dict[Any, Any]],
    joiner: Gatherer,
    where: Callable[[Any], str],
) -> dict[Any, Any]:
    """Returns what a list has, whose replicas' copies have grown, shrunk or changed."""
    before = contents_of(value)
    lists = [list(one.values()) for one in now]
    lengths, kept = [len(entries) for entries in lists], len(before)
    grown = [entries[kept:] for entries in lists]
    only_grown = min(lengths) >= kept and all(
        one[i] is was[i] for one, was in zip(now, handed, strict=True) for i in range(kept)
    )
    if only_grown and joiner.are_per_example(grown):
        return dict(enumerate([*before.values(), *joiner.concatenate(grown)]))
    if len(set(lengths)) > 1:
        _refuse(where(value), f"to lengths {lengths} that are not those of their examples")
    rows = [[one[i] for one in lists] for i in range(lengths[0])]
    entries = [_entry(i, before[i], row, handed, joiner) for i, row in enumerate(rows[:kept])]
    added = [joiner.added(row, len(rows) - kept) for row in rows[kept:]]
    if only_grown and joiner.are_as_many(grown):
        if any(isinstance(entry, PerReplica) for entry in added):
            added = joiner.concatenate(grown)
    return dict(enumerate(entries + added))


def _refuse(where: str, what: str) -> NoReturn:
    raise StrategyError(
        f"a split call has changed {where}: {what}; what a forward changes in an argument is "
        "joined as outputs are: tensors whose first dimension is the number of examples are "
        "concatenated, 0-d floating ones averaged, equal values stay; return the values instead, "
        "or call the module inside strategy.run, with an object for each replica"
    )
