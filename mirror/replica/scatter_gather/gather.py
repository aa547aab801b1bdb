"""Gathers the outputs of a split call into what one device would return.

    the replicas return                            the caller gets
    tensors, first dimension their examples        their concatenation; also of NumPy arrays
    0-d floating tensors                           the whole batch's value, see loss_reduction.py
    equal numbers or strings, or one object        that value
    equal sizes, without a dimension of examples   that size
    lists with an entry for each example, uneven   one list, in the order of the examples
    their copies of an argument                    the argument
    objects that are data, with tensors inside     one object, its attributes joined
    anything else                                  PerReplica

``mutations.py`` joins changed arguments by the same rules; there, equal tensors are joined too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, MutableMapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import numpy as np
import torch
from torch import Tensor, nn

from mirror.base.bitwise import are_equal
from mirror.base.containers import (
    IMMUTABLE,
    assign,
    contents_of,
    empty_like,
    is_consumed,
    is_leaf,
    is_object,
    is_shared,
)
from mirror.comm.reduce_ops import weighted_mean
from mirror.errors import StructureError
from mirror.execution.runner import Runner
from mirror.replica.exactness.loss_reduction import (
    Branched,
    Divided,
    Weights,
    is_compiled,
    weighted_sum,
    weights_of,
)
from mirror.replica.exactness.node_rules import NotReducible
from mirror.replica.gradients.parallel_backward import mark_boundary
from mirror.replica.layers.unsplit_layers import is_state
from mirror.replica.scatter_gather.scatter import ReplicaArgs
from mirror.threads.user_frames import warn_user
from mirror.values import (
    ABSENT,
    PerReplica,
    are_identical,
    is_number,
    map_structure,
    rebuild_node,
)


def join_outputs(
    runner: Runner,
    results: dict[int, Any],
    sizes: Sequence[float],
    parts: Sequence[ReplicaArgs] = (),
    module: nn.Module | None = None,
    varying: Container[int] = (),
    is_compared: bool = False,
) -> Any:
    """Returns the replicas' outputs, joined into what one device would return.

    Tensors with the replica's number of examples as their first dimension are concatenated. 0-d
    floating ones become the example-weighted mean; in a split call their graphs may show other
    weights. Other leaves stay if they are equal, and become PerReplica if not. Differentiable.

    Args:
        results: the output of each replica that ran, by replica.
        sizes: every replica's number of examples.
        parts: the replicas' arguments in a split call: arguments that are returned become the
            caller's objects, and objects that are data are joined.
        module: the module of the split call.
        varying: the positions, among the leaves of the outputs, of numbers that depend on the
            part: they become PerReplica although they may be equal.
        is_compared: whether the outputs will be compared with those of one device.

    Raises:
        StructureError: the replicas' outputs differ in structure.
    """
    gatherer = Gatherer(runner, sizes, list(results), parts, module, varying)
    gatherer.is_compared = is_compared
    outputs: Sequence[Any] = tuple(results.values())
    if parts and type(outputs[0]) is not Tensor:
        outputs = gatherer.mark_entries(outputs)
    try:
        return map_structure(gatherer.output, *outputs)
    except StructureError as error:
        raise StructureError(
            f"the replicas' outputs of a split call differ in structure: {error}; return the same "
            "structure for every part of a batch"
        ) from None


_MISSING: Any = object()


class _NotJoined(Exception):
    """The parts cannot be joined into one value."""


class _Entries:
    """A replica's list with an entry for each of its examples: a leaf of its outputs."""

    __slots__ = ("values",)

    def __init__(self, values: Sequence[Any]) -> None:
        self.values = values


class Gatherer:
    """Joins values of the replicas that ran.

    Args:
        sizes: every replica's number of examples, 0 for an idle replica.
        ids: the replicas that ran.
        parts: the replicas' arguments, for values of a split call.
        module: the called module, for its outputs.
        varying: see ``join_outputs``.
    """

    def __init__(
        self,
        runner: Runner,
        sizes: Sequence[float],
        ids: Sequence[int],
        parts: Sequence[ReplicaArgs] = (),
        module: nn.Module | None = None,
        varying: Container[int] = (),
    ) -> None:
        self._varying, self._num_outputs = varying, 0
        self._runner = runner
        self._sizes = sizes
        self._ids = ids
        self._parts = parts
        self._module = module
        mesh = runner.replicas.mesh
        self._first_device = mesh.positions[0][0]
        self._mesh = mesh if mesh.is_model_parallel else None
        self._counts = [sizes[r] for r in ids]
        self._total = sum(self._counts)
        # Per replica that ran: the caller's object, by id of the replica's copy of it.
        self._origins: list[dict[int, Any]] | None = None
        self._joined_objects: dict[int, Any] = {}
        self.is_compared = False
        self._is_new = False  # the object being joined is not, and is not in, an argument

    def mark_entries(self, parts: Sequence[Any]) -> Sequence[Any]:
        """Returns the replicas' outputs, with lists of entries of examples as leaves."""
        first = parts[0]
        kind = type(first)
        if kind is Tensor or is_leaf(first) or any(type(part) is not kind for part in parts):
            return parts
        if kind is list:
            # Lists of even parts may have an entry for each layer or loss.
            is_uneven = len({*self._counts}) > 1
            if is_uneven and [len(part) for part in parts] == self._counts:
                return [_Entries(part) for part in parts]
        elif kind not in (tuple, dict) and not isinstance(first, (tuple, MutableMapping)):
            return parts
        held = [contents_of(part) for part in parts]
        if any(one.keys() != held[0].keys() for one in held):
            return parts
        rows = {key: self.mark_entries([one[key] for one in held]) for key in held[0]}
        if all(are_identical(row, [one[key] for one in held]) for key, row in rows.items()):
            return parts
        marked = [{key: row[i] for key, row in rows.items()} for i in range(len(parts))]
        return list(map(rebuild_node, parts, marked))

    def output(self, *parts: Any) -> Any:
        """Joins one leaf of the outputs."""
        first = parts[0]
        position, self._num_outputs = self._num_outputs, self._num_outputs + 1
        if type(first) is _Entries:
            return self.concatenate([part.values for part in parts])
        if position in self._varying and len(parts) > 1:
            return self.as_per_replica(parts)
        if len(parts) > 1 and parts[1] is first and all(part is first for part in parts):
            return self._origin_of(parts, first)
        if False not in [isinstance(part, Tensor) for part in parts]:
            tensor = self._join_tensors(parts)
            if tensor is not None:
                return tensor
        elif (len(parts) == 1 and not is_object(first)) or _are_equal_values(parts):
            return self._origin_of(parts, first)
        elif isinstance(first, torch.Size) and self._is_size_of_no_part(parts):
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
        """Joins one entry of an argument; ``before`` is its value before the call."""
        if _keeps_first_dim(parts, before) and not self._parts[0].split.is_batched(before):
            value = self.merge_unbatched(parts)
            return self.as_per_replica(parts) if value is None else value
        try:
            return self.join(parts)
        except _NotJoined:
            return self.as_per_replica(parts)

    def gather_some(self, which: Sequence[int], parts: Sequence[Any]) -> Any:
        """Joins an entry that only some replicas have made.

        Args:
            which: the indices of these replicas among those that ran.
        """
        if len(which) == len(self._ids):
            return self.entry(parts)
        split = isinstance(parts[0], Tensor) and parts[0].shape[:1] == (self._counts[which[0]],)
        if len(which) == 1 and not split:
            return self.to_first_device(parts[0])
        return self.as_per_replica(parts, [self._ids[i] for i in which])

    def merge_unbatched(self, parts: Sequence[Tensor]) -> Tensor | None:
        """Joins tensors without a dimension of examples; returns ``None`` if they differ."""
        local = [part.to(self._first_device) for part in parts]
        if all(part.shape == local[0].shape and torch.equal(part, local[0]) for part in local):
            return local[0]
        if self._total and local[0].dim() == 0 and local[0].is_floating_point():
            return weighted_mean(local, self._counts)
        return None

    def as_per_replica(
        self, parts: Sequence[Any], ids: Sequence[int] | None = None
    ) -> PerReplica[Any]:
        """Returns the parts as a PerReplica."""
        values: list[Any] = [ABSENT] * len(self._sizes)
        for replica_id, part in zip(self._ids if ids is None else ids, parts, strict=True):
            values[replica_id] = part
        return PerReplica(values, weights=self._sizes)._mark_split_call(bool(self._parts))

    def join(self, parts: Sequence[Any]) -> Any:
        """Returns the one value that the parts form.

        Raises:
            _NotJoined: they form none.
        """
        first = parts[0]
        origin = self._origin_of(parts, _MISSING)
        if origin is not _MISSING:
            return origin
        if len(parts) > 1 and all(part is first for part in parts):
            return first
        if any(isinstance(part, Tensor) for part in parts):
            return self._join_some_tensors(parts)
        if any(type(part) is not type(first) for part in parts):
            raise _NotJoined
        if is_leaf(first) or is_consumed(first) or isinstance(first, frozenset):
            return self._join_leaf(parts)
        if id(first) not in self._joined_objects:
            self._joined_objects[id(first)] = self._join_contents(parts)
        return self._joined_objects[id(first)]

    def concatenate(self, parts: Sequence[Sequence[Any]]) -> list[Any]:
        """Returns the entries of all parts, one replica after the other."""
        entries = (entry for part in parts for entry in part)
        return [map_structure(self.to_first_device, entry) for entry in entries]

    def to_first_device(self, value: Any) -> Any:
        """Returns one replica's value on the first replica's device."""
        if not isinstance(value, Tensor):
            return value
        return value.to(
            self._first_device if self._mesh is None else self._first_device_for(value)
        )

    def are_sizes(self, numbers: Sequence[Any]) -> bool:
        """Returns whether these are the numbers of examples of the replicas that ran."""
        return list(numbers) == self._counts

    def are_per_example(self, parts: Sequence[Sequence[Any]]) -> bool:
        """Returns whether each replica's list has one entry per example, not per step."""
        if [len(part) for part in parts] != self._counts:
            return False
        if len(set(self._counts)) > 1:
            return True
        entries = [entry for part in parts for entry in part]
        # Tensors could just as well be one per layer.
        of_numbers = all(is_leaf(e) and not isinstance(e, Tensor) for e in entries)
        return of_numbers and self._counts[0] > 1

    def are_as_many_as_examples(self, parts: Sequence[Sequence[Any]]) -> bool:
        """Returns whether each replica has as many entries as examples, and one has several."""
        return [len(part) for part in parts] == self._counts and max(self._counts) > 1

    def join_added(self, parts: Sequence[Any], num_added: int) -> Any:
        """Joins one of the entries that were added to a list."""
        is_any = num_added == 1 and set(self._counts) == {1} and len(parts) > 1
        if is_any and is_leaf(parts[0]) and not isinstance(parts[0], Tensor):
            return self.as_per_replica(parts)  # one per example or one per call: ambiguous
        return self.entry(parts)

    def _first_device_for(self, part: Tensor) -> torch.device:
        """Returns the first replica's device at the position of a part's device."""
        return self._first_device if self._mesh is None else self._mesh.peers_of(part.device)[0]

    def _join_tensors(self, parts: Sequence[Tensor]) -> Tensor | None:
        device = self._first_device if self._mesh is None else self._first_device_for(parts[0])
        if _are_batched(parts, self._counts) and (len(parts) == 1 or not is_state(parts[0])):
            local = [part.to(device) for part in mark_boundary(self._runner, self._ids, parts)]
            return local[0] if len(local) == 1 else torch.cat(local)
        is_joined = self._total or len(parts) == 1  # one part of 0: a worker without examples
        if is_joined and all(part.dim() == 0 and part.is_floating_point() for part in parts):
            local = [part.to(device) for part in mark_boundary(self._runner, self._ids, parts)]
            if len(local) == 1:
                only: Tensor = local[0]
                return only
            weights = self._weights_of(parts)
            if weights is None:
                return weighted_mean(local, self._counts)
            return weighted_sum(local, weights)
        return None

    def _weights_of(self, parts: Sequence[Tensor]) -> Weights | None:
        """Returns the weights of 0-d outputs; ``None`` for their numbers of examples."""
        if self._module is None or len(parts) == 1:
            return None
        try:
            has_share = any(part.has_share for part in self._parts)
            if is_compiled(parts) and not has_share:
                _refuse_ignored_labels(self._module, self._parts)
            return weights_of(parts, self._counts, has_share or self._module in _divided)
        except NotReducible as why:
            if isinstance(why, Divided):
                _divided.add(self._module)
            if not (isinstance(why, Branched) and self.is_compared):
                _warn_once(type(self._module), str(why))
            return None

    def _join_some_tensors(self, parts: Sequence[Any]) -> Tensor:
        if not all(isinstance(part, Tensor) for part in parts):
            raise _NotJoined
        tensor = self._join_tensors(parts)
        if tensor is not None:
            return tensor
        device = self._first_device_for(parts[0])
        first: Tensor = parts[0].to(device)
        for part in parts[1:]:
            if part.shape != first.shape or part.dtype != first.dtype or part.requires_grad:
                raise _NotJoined
            if not torch.equal(part.to(device), first):
                raise _NotJoined
        return first

    def _join_leaf(self, parts: Sequence[Any]) -> Any:
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
        if isinstance(first, torch.Size) and not self._is_size_of_no_part(parts):
            raise _NotJoined
        if self._is_new and type(first) is int and self.are_sizes(parts):
            raise _NotJoined
        if all(type(part) is type(first) and bool(part == first) for part in parts):
            return first
        raise _NotJoined

    def _is_size_of_no_part(self, sizes: Sequence[Any]) -> bool:
        """Returns whether these are one torch.Size without a dimension of examples."""
        if any(type(size) is not torch.Size or size != sizes[0] for size in sizes):
            return False
        return not any(self.are_sizes(dimension) for dimension in zip(*sizes, strict=True))

    def _join_contents(self, parts: Sequence[Any]) -> Any:
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
            return rebuild_node(first, self._join_by_key(held))
        shell = self._joined_objects[id(first)] = empty_like(first)
        return assign(shell, self._join_by_key(held))

    def _join_by_key(self, held: Sequence[dict[Any, Any]]) -> dict[Any, Any]:
        return {key: self.join([one[key] for one in held]) for key in held[0]}

    def _origin_of(self, parts: Sequence[Any], default: Any) -> Any:
        """Returns the caller's object if the parts are the replicas' copies of it."""
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


def _keeps_first_dim(parts: Sequence[Any], before: Any) -> bool:
    """Returns whether tensors have replaced one with as many rows, that is not empty."""
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


def _are_equal_values(parts: Sequence[Any]) -> bool:
    plain = all(is_number(part) or isinstance(part, (str, bytes)) for part in parts)
    return plain and all(are_equal(part, parts[0]) for part in parts)


_warned: WeakKeyDictionary[type[nn.Module], set[str]] = WeakKeyDictionary()
_checked: WeakSet[nn.Module] = WeakSet()
# Models that divide a sum by a number of the replica. Where it is equal on all by chance, it is
# not a constant: the replicas' values are averaged, as at other calls.
_divided: WeakSet[nn.Module] = WeakSet()


def _refuse_ignored_labels(module: nn.Module, parts: Sequence[ReplicaArgs]) -> None:
    """Checks the arguments of compiled code for labels that a loss ignores.

    Only a module's first call is checked, since the check waits for the devices.

    Raises:
        NotReducible: an argument has integers below zero.
    """
    if module in _checked:
        return
    _checked.add(module)
    if any(part.has_ignored() for part in parts):
        raise NotReducible("of compiled code, and of labels below zero, ignored perhaps")


def _warn_once(kind: type[nn.Module], what: str) -> None:
    """Warns, once for each module type and cause, that an averaged output may not be exact."""
    causes = _warned.setdefault(kind, set())
    if what in causes:
        return
    causes.add(what)
    warn_user(
        f"a 0-d output of {kind.__name__} is averaged over the parts of the batch by their "
        f"numbers of examples, which is exact for a mean over examples; this output is {what}, "
        "so the result differs from one device's. Return one value per example, or compute the "
        "loss outside the model; if the model divides a sum by a number, pass the whole batch's "
        "number as num_items_in_batch"
    )
