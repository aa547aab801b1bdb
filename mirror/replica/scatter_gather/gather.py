"""Joining what the replicas of a split call leave: their outputs, and changed arguments.

    the replicas leave                             joined
    tensors, first dimension their examples        their concatenation; arrays, too
    0-d floating tensors                           the whole batch's, see scalar_outputs.py
    equal numbers, strings; one object, or tensor  that
    equal sizes, without a dimension of examples   that
    their copies of an argument                    the argument
    objects that are data, with tensors inside     one with its attributes joined
    anything else                                  PerReplica

In an argument that has been changed, values are joined in the same way, equal tensors too, and:

    a list that has grown by as many as examples   what was added, one replica after the other
    a list that has grown by equally many          entry by entry
    a dict or object                               key by key; a key of one replica alone is taken
    a set                                          what any has added, without what any has removed

The outputs of a split call, joined into what one device would have returned.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mirror.errors import StructureError
from mirror.execution.runner import Runner
from mirror.replica.collectives.reduce_ops import weighted_mean
from mirror.replica.exactness.loss_reduction import (
    NotReducible,
    Weights,
    is_compiled,
    joined_value,
    weights_of,
)
from mirror.replica.gradients.graph_boundary import mark_boundary
from mirror.replica.scatter_gather.containers import (
    IMMUTABLE,
    assign,
    contents_of,
    empty_like,
    is_consumed,
    is_leaf,
    is_object,
    is_shared,
)
from mirror.replica.scatter_gather.inexact_outputs import warn_of_ignored, warn_once
from mirror.replica.scatter_gather.recurrent_states import is_state
from mirror.replica.scatter_gather.scatter import ReplicaArgs
from mirror.values import ABSENT, PerReplica, is_number, map_structure, rebuild_node

_MISSING: Any = object()


class _NotJoined(Exception):
    """Parts that are not one value together."""


class Gatherer:
    """Joins values of the replicas that ran.

    Args:
        sizes: every replica's number of examples, 0 for one that sat out.
        ids: the replicas that ran.
        parts: what they were handed, for values of a split call.
        module: what was called, for its outputs.
    """

    def __init__(
        self,
        runner: Runner,
        sizes: Sequence[float],
        ids: Sequence[int],
        parts: Sequence[ReplicaArgs] = (),
        module: nn.Module | None = None,
    ) -> None:
        self._runner = runner
        self._sizes = sizes
        self._ids = ids
        self._parts = parts
        self._module = module
        places = runner.replicas.places
        self._home, self._places = (
            places.positions[0][0],
            places if places.is_model_parallel else None,
        )
        self._counts = [sizes[r] for r in ids]
        self._total = sum(self._counts)
        self._origins: list[dict[int, Any]] | None = None  # by id of a replica's copy
        self._made: dict[int, Any] = {}
        self._is_new = False  # whether an object is joined that no argument is or holds

    def output(self, *parts: Any) -> Any:
        """Joins one leaf of the outputs."""
        first = parts[0]
        if len(parts) > 1 and parts[1] is first and all(part is first for part in parts):
            return self._origin_of(parts, first)
        if False not in [isinstance(part, Tensor) for part in parts]:
            tensor = self._tensor(parts)
            if tensor is not None:
                return tensor
        elif (len(parts) == 1 and not is_object(first)) or _are_equal(parts):
            return self._origin_of(parts, first)
        elif isinstance(first, torch.Size) and self._is_of_no_part(parts):
            return first
        elif isinstance(first, np.ndarray) and _are_batched(parts, self._counts):
            return np.concatenate(parts)
        elif self._parts and is_object(first):
            origin = self._origin_of(parts, _MISSING)
            if origin is not _MISSING:
                return origin
            self._is_new = True
            try:
                return self.join(parts)
            except _NotJoined:
                pass
            finally:
                self._is_new = False
        return self.as_per_replica(parts)

    def entry(self, parts: Sequence[Any], before: Any = None) -> Any:
        """Joins one entry of an argument, which was ``before``."""
        if _stays_whole(parts, before) and not self._parts[0].split.is_batched(before):
            value = self.merge_unbatched(parts)
            return self.as_per_replica(parts) if value is None else value
        try:
            return self.join(parts)
        except _NotJoined:
            return self.as_per_replica(parts)

    def of_some(self, which: Sequence[int], parts: Sequence[Any]) -> Any:
        """Joins an entry that only some of those that ran have made, ``which`` by position."""
        if len(which) == len(self._ids):
            return self.entry(parts)
        split = isinstance(parts[0], Tensor) and parts[0].shape[:1] == (self._counts[which[0]],)
        if len(which) == 1 and not split:
            return self.to_first_device(parts[0])
        return self.as_per_replica(parts, [self._ids[i] for i in which])

    def merge_unbatched(self, parts: Sequence[Tensor]) -> Tensor | None:
        """Joins tensors of which none has a dimension of examples; ``None``: they differ."""
        here = [part.to(self._home) for part in parts]
        if all(part.shape == here[0].shape and torch.equal(part, here[0]) for part in here):
            return here[0]
        if self._total and here[0].dim() == 0 and here[0].is_floating_point():
            return weighted_mean(here, self._counts)
        return None

    def as_per_replica(
        self, parts: Sequence[Any], ids: Sequence[int] | None = None
    ) -> PerReplica[Any]:
        """Returns the parts as they are."""
        values: list[Any] = [ABSENT] * len(self._sizes)
        for replica_id, part in zip(self._ids if ids is None else ids, parts, strict=True):
            values[replica_id] = part
        return PerReplica(values, weights=self._sizes)._left_apart(bool(self._parts))

    def join(self, parts: Sequence[Any]) -> Any:
        """Returns the value that the parts are together.

        Raises:
            _NotJoined: they are none.
        """
        first = parts[0]
        origin = self._origin_of(parts, _MISSING)
        if origin is not _MISSING:
            return origin
        if len(parts) > 1 and all(part is first for part in parts):
            return first
        if any(isinstance(part, Tensor) for part in parts):
            return self._equal_or_joined(parts)
        if any(type(part) is not type(first) for part in parts):
            raise _NotJoined
        if is_leaf(first) or is_consumed(first) or isinstance(first, frozenset):
            return self._leaf(parts)
        if id(first) not in self._made:
            self._made[id(first)] = self._holder(parts)
        return self._made[id(first)]

    def concatenate(self, parts: Sequence[Sequence[Any]]) -> list[Any]:
        """Returns the entries of all parts, one replica after the other."""
        return [self.to_first_device(entry) for part in parts for entry in part]

    def to_first_device(self, value: Any) -> Any:
        """Returns one replica's value on the first replica's device."""
        if not isinstance(value, Tensor):
            return value
        return value.to(self._home if self._places is None else self._home_of(value))

    def are_sizes(self, numbers: Sequence[Any]) -> bool:
        """Whether these are the numbers of examples of those that ran."""
        return list(numbers) == self._counts

    def are_per_example(self, parts: Sequence[Sequence[Any]]) -> bool:
        """Whether replicas have an entry for each of their examples, and not for each step."""
        if [len(part) for part in parts] != self._counts:
            return False
        if len(set(self._counts)) > 1:
            return True
        entries = [entry for part in parts for entry in part]
        # Tensors are as likely those of every layer.
        of_numbers = all(is_leaf(e) and not isinstance(e, Tensor) for e in entries)
        return of_numbers and self._counts[0] > 1

    def are_as_many(self, parts: Sequence[Sequence[Any]]) -> bool:
        """Whether replicas have as many entries as they have examples, more than one."""
        return [len(part) for part in parts] == self._counts and max(self._counts) > 1

    def added(self, parts: Sequence[Any], num_added: int) -> Any:
        """Joins one of the entries that a list has got."""
        is_any = num_added == 1 and set(self._counts) == {1} and len(parts) > 1
        if is_any and is_leaf(parts[0]) and not isinstance(parts[0], Tensor):
            return self.as_per_replica(parts)  # of every example, or of the call: nothing tells
        return self.entry(parts)

    def _home_of(self, part: Tensor) -> torch.device:
        """Returns the first replica's device at the position that a part is at."""
        return self._home if self._places is None else self._places.replica_at(part.device)[0]

    def _tensor(self, parts: Sequence[Tensor]) -> Tensor | None:
        home = self._home if self._places is None else self._home_of(parts[0])
        if _are_batched(parts, self._counts) and (len(parts) == 1 or not is_state(parts[0])):
            here = [part.to(home) for part in mark_boundary(self._runner, self._ids, parts)]
            return here[0] if len(here) == 1 else torch.cat(here)
        if self._total and all(part.dim() == 0 and part.is_floating_point() for part in parts):
            here = [part.to(home) for part in mark_boundary(self._runner, self._ids, parts)]
            weights = self._weights_of(parts)
            if weights is None:
                return weighted_mean(here, self._counts)
            return joined_value(here, weights)
        return None

    def _weights_of(self, parts: Sequence[Tensor]) -> Weights | None:
        """Returns what 0-d outputs count with; ``None``: as their examples."""
        if self._module is None or len(parts) == 1:
            return None
        try:
            if is_compiled(parts) and not any(part.has_share for part in self._parts):
                warn_of_ignored(self._module, self._parts)
            return weights_of(parts, self._counts, any(part.has_share for part in self._parts))
        except NotReducible as why:
            warn_once(type(self._module), str(why))
            return None

    def _equal_or_joined(self, parts: Sequence[Any]) -> Tensor:
        if not all(isinstance(part, Tensor) for part in parts):
            raise _NotJoined
        tensor = self._tensor(parts)
        if tensor is not None:
            return tensor
        home = self._home if self._places is None else self._home_of(parts[0])
        first: Tensor = parts[0].to(home)
        for part in parts[1:]:
            if part.shape != first.shape or part.dtype != first.dtype or part.requires_grad:
                raise _NotJoined
            if not torch.equal(part.to(home), first):
                raise _NotJoined
        return first

    def _leaf(self, parts: Sequence[Any]) -> Any:
        first = parts[0]
        if len(parts) == 1:
            return first
        if isinstance(first, np.ndarray):
            if _are_batched(parts, self._counts):
                return np.concatenate(parts)
            if all(np.array_equal(part, first) for part in parts):
                return first
            raise _NotJoined
        if isinstance(first, PerReplica):
            raise _NotJoined
        if isinstance(first, torch.Size) and not self._is_of_no_part(parts):
            raise _NotJoined
        if self._is_new and type(first) is int and self.are_sizes(parts):
            raise _NotJoined
        if all(type(part) is type(first) and bool(part == first) for part in parts):
            return first
        raise _NotJoined

    def _is_of_no_part(self, sizes: Sequence[Any]) -> bool:
        """Whether these are all one torch.Size, and none of its dimensions is of examples."""
        if any(type(size) is not torch.Size or size != sizes[0] for size in sizes):
            return False
        return not any(self.are_sizes(dimension) for dimension in zip(*sizes, strict=True))

    def _holder(self, parts: Sequence[Any]) -> Any:
        first = parts[0]
        if is_shared(first):
            if len(parts) == 1:
                return first
            raise _NotJoined
        held = [contents_of(part) for part in parts]
        if isinstance(first, set):
            return set[Any]().union(*held)
        if any(one.keys() != held[0].keys() for one in held):
            if isinstance(first, (list, deque)) and self.are_per_example(parts):
                return assign(empty_like(first), dict(enumerate(self.concatenate(parts))))
            raise _NotJoined
        if isinstance(first, tuple):
            return rebuild_node(first, self._by_key(held))
        shell = self._made[id(first)] = empty_like(first)
        return assign(shell, self._by_key(held))

    def _by_key(self, held: Sequence[dict[Any, Any]]) -> dict[Any, Any]:
        return {key: self.join([one[key] for one in held]) for key in held[0]}

    def _origin_of(self, parts: Sequence[Any], default: Any) -> Any:
        """Returns the argument of the caller's of which the parts are the replicas' copies."""
        if not self._parts or type(parts[0]) in IMMUTABLE:
            return default
        if self._origins is None:
            self._origins = [
                {id(own): value for value, own in part.own.values()} for part in self._parts
            ]
        first = self._origins[0].get(id(parts[0]), _MISSING)
        if first is _MISSING or isinstance(first, PerReplica):
            return default
        pairs = zip(self._origins, parts, strict=True)
        return first if all(o.get(id(p), _MISSING) is first for o, p in pairs) else default


def _stays_whole(parts: Sequence[Any], before: Any) -> bool:
    """Whether tensors have taken the place of one like them that has something in it."""
    if not isinstance(before, Tensor) or not before.dim() or not before.numel():
        return False
    shape = before.shape
    return all(
        isinstance(p, Tensor) and p.dim() == len(shape) and p.shape[0] == shape[0] for p in parts
    )


def _are_batched(parts: Sequence[Any], counts: Sequence[float]) -> bool:
    rest = parts[0].shape[1:]
    for part, count in zip(parts, counts, strict=True):
        shape = part.shape
        if not shape or shape[0] != count or shape[1:] != rest:
            return False
    return True


def _are_equal(parts: Sequence[Any]) -> bool:
    first = parts[0]
    plain = all(is_number(part) or isinstance(part, (str, bytes)) for part in parts)
    return plain and all(type(p) is type(first) and np.array_equal(p, first) for p in parts)


def join_outputs(
    runner: Runner,
    results: dict[int, Any],
    sizes: Sequence[float],
    parts: Sequence[ReplicaArgs] = (),
    module: nn.Module | None = None,
) -> Any:
    """Joins the replicas' outputs into what one device would have returned.

    Tensors whose first dimension is the replica's number of examples are concatenated, 0-d
    floating ones become the example-weighted mean (or what their graphs tell, of a split call),
    equal other leaves stay; the rest becomes PerReplica. Differentiable.

    Args:
        parts: what the replicas were handed, of a split call. Its arguments come out as
            themselves, and objects that hold the batch are joined, too.
        module: what the split call was of.

    Raises:
        StructureError: the replicas' outputs differ in structure.
    """
    joiner = Gatherer(runner, sizes, list(results), parts, module)
    try:
        return map_structure(joiner.output, *results.values())
    except StructureError as error:
        raise StructureError(
            f"the replicas' outputs of a split call differ in structure: {error}; return the same "
            "structure for every part of a batch"
        ) from None
