"""ReadyGrads: the local gradients of a pass, and operations on lists of gradients.

The file follows a gradient from its slot to ``.grad``: it is recorded (``ReadyGrads``), taken out
of the slot, weighted, changed by hooks and accumulated. Functions for gradients that are not dense
follow: sparse, complex, with a graph, or absent. ``DeferredGrads`` keeps gradients under
``no_sync``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, repeat
from typing import Any

import torch
from torch import Tensor, nn

from mirror.base.torch_private import num_sharers
from mirror.comm.reduce_ops import reduce_tensors
from mirror.device.streams import ReplicaStreams
from mirror.replica.params.mirrored_tensor import GRAD
from mirror.replica.params.replicated_param import (
    ReplicaParameter,
    ReplicatedParam,
    apply_hooks,
    refuse_sparse,
)
from mirror.values import are_identical

ReplicaGrads = list[Any]  # one replica's local gradients; None where it has none

# Read and write the C++ slot of a copy, which holds its local gradient.
local_grad = GRAD.__get__
set_local_grad = GRAD.__set__


class ReadyGrads:
    """The copies with local gradients from a pass, and the lists derived from them.

    Passes repeat, so the lists are computed once; ``are_ready`` compares in 20 ns per copy.

    Attributes:
        variables: the variables of the copies, in the order of arrival.
        copies, targets: per replica, those of all variables, with or without a gradient.
        is_complex: whether a variable is complex; communicators take real tensors only.
        is_regular: whether every replica had one gradient of each variable, in the same order.
    """

    __slots__ = ("_arrived", "_rest", "copies", "is_complex", "is_regular", "targets", "variables")

    def __init__(self, arrived: Sequence[Sequence[ReplicaParameter]]) -> None:
        self._arrived = tuple(map(tuple, arrived))
        self._rest: tuple[int, ReadyGrads] | None = None
        self.variables = list(dict.fromkeys(copy.variable for copy in chain(*arrived)))
        self.copies = [[v.copies[r] for v in self.variables] for r in range(len(arrived))]
        self.targets = [[v.targets[r] for v in self.variables] for r in range(len(arrived))]
        self.is_complex = any(v.copies[0].is_complex() for v in self.variables)
        self.is_regular = all(map(are_identical, self._arrived, self.copies))

    def are_ready(self, arrived: Sequence[Sequence[ReplicaParameter]]) -> bool:
        """Whether the same copies have arrived in the same order."""
        return all(map(are_identical, self._arrived, arrived))

    def skip(self, num_taken: int) -> ReadyGrads:
        """Returns the arrivals without the first ``num_taken`` of every replica."""
        if self._rest is None or self._rest[0] != num_taken:
            self._rest = (num_taken, ReadyGrads([copies[num_taken:] for copies in self._arrived]))
        return self._rest[1]


def take(copies: Sequence[Sequence[ReplicaParameter]]) -> list[ReplicaGrads]:
    """Takes the local gradients out of the slots of copies; returns a list per replica."""
    columns: list[ReplicaGrads] = []
    for mine in copies:
        columns.append(list(map(local_grad, mine)))
        deque(map(set_local_grad, mine, repeat(None)), maxlen=0)
    return columns


def unshare(
    columns: list[ReplicaGrads], positions: Sequence[int], streams: ReplicaStreams | None
) -> None:
    """Clones gradients that share their memory, so that it can be written.

    During a backward pass another gradient may lie in the same memory: the gradient of ``p`` in
    ``x + p.view(1, -1)`` is a view of that of ``x``. Autograd counts holders of the tensor only,
    not of its memory.

    Args:
        positions: the indices of the gradients that will be written.
        streams: the streams on which replicas may use the clones; ``None`` without GPUs.
    """
    shared: list[ReplicaGrads] = [[] for _ in columns]
    clones: list[ReplicaGrads] = [[] for _ in columns]
    for r, column in enumerate(columns):
        counts = num_sharers([column[i] for i in positions])
        for i, sharers in zip(positions, counts, strict=True):
            if sharers:
                shared[r].append(column[i])
                column[i] = column[i].clone()
                clones[r].append(column[i])
    if streams is not None:
        streams.keep(shared, clones)


def common_scale(shares: Mapping[int, float]) -> float | None:
    """Returns the share that all replicas have; ``None`` where they differ."""
    different = set(shares.values())
    return different.pop() if len(different) == 1 else None


def weigh(columns: list[ReplicaGrads], shares: Mapping[int, float]) -> None:
    """Multiplies each replica's gradients by its share, in place where that is possible."""
    for r, column in enumerate(columns):
        share = shares.get(r, 0.0)
        if share == 0.0:  # dropped, since 0 * NaN is NaN
            column[:] = [None] * len(column)
        present = [grad for grad in column if grad is not None]
        if present and share != 1.0:
            if any(grad.requires_grad or grad.is_sparse for grad in present):
                column[:] = [None if grad is None else _scale(grad, share) for grad in column]
            else:
                torch._foreach_mul_(present, share)


def _scale(grad: Tensor, share: float) -> Tensor:
    with torch.set_grad_enabled(grad.requires_grad):  # keeps the graph of create_graph=True
        return grad * share


def are_usual(grads: Sequence[Tensor | None]) -> bool:
    """Whether all gradients are present, dense and without a graph."""
    for grad in grads:  # noqa: SIM110  a generator costs a call for each gradient
        if grad is None or grad.requires_grad or grad.is_sparse:
            return False
    return True


def add_grads(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """Returns the sum of two gradients, either of which may be absent or sparse."""
    if a is None or b is None:
        return b if a is None else a
    if a.is_sparse and not b.is_sparse:
        a, b = b, a  # torch adds sparse to dense only in this order
    with torch.set_grad_enabled(a.requires_grad or b.requires_grad):
        return a + b


def accumulate(targets: Sequence[nn.Parameter], reduced: Sequence[Tensor]) -> None:
    """Adds reduced gradients to the targets' ``.grad``."""
    sums, summands = [], []
    for target, grad in zip(targets, reduced, strict=True):
        if target.grad is None:
            target.grad = grad
        elif target.grad.is_sparse or target.grad.requires_grad:
            accumulate_one(target, grad)
        else:
            sums.append(target.grad)
            summands.append(grad)
    if sums:
        torch._foreach_add_(sums, summands)


def accumulate_one(target: nn.Parameter, grad: Tensor) -> None:
    """Adds a gradient that may be sparse or carry a graph; in place where autograd does it."""
    known = target.grad
    if known is None:
        target.grad = grad
        return
    if not (known.requires_grad or grad.requires_grad or (known.is_sparse and not grad.is_sparse)):
        known += grad
        return
    total = target.grad = add_grads(known, grad)
    assert total is not None
    variable: ReplicatedParam = target.variable  # type: ignore[attr-defined]
    variable.gradients.record_replacement(variable, known, total)


def fill_missing(grad: Tensor | None, variable: ReplicatedParam, replica_id: int) -> Tensor:
    """Returns a replica's gradient, or zeros if there is none."""
    if grad is None:
        return torch.zeros_like(variable.targets[replica_id])
    return grad


def run_hooks(variables: Sequence[ReplicatedParam], columns: Sequence[ReplicaGrads]) -> None:
    """Calls the gradient hooks of variables, and replaces the reduced gradients by the results.

    Args:
        columns: per replica, the reduced gradients of ``variables``. Hooks get replica 0's.
    """
    for i, variable in enumerate(variables):
        if variable.hooks:
            home, device = variable.home.device, columns[0][i].device
            grad = apply_hooks(variable.hooks, columns[0][i].to(home))
            columns[0][i] = grad.to(device)
            for column in columns[1:]:
                column[i] = grad.to(column[i].device, copy=True)


def are_non_dense(grads: Sequence[Tensor | None]) -> bool:
    """Whether a communicator cannot take one of a variable's gradients."""
    return any(g is not None and (g.is_sparse or g.requires_grad or g.is_complex()) for g in grads)


def reduce_non_dense(
    variable: ReplicatedParam, grads: Sequence[Tensor | None], scale: float
) -> None:
    """Reduces one variable's gradients that are sparse, complex or carry a graph, into ``.grad``.

    The sum is sparse if all gradients are, and keeps their graphs.
    """
    refuse_sparse(variable.home, variable.name)
    present = [grad for grad in grads if grad is not None]
    if not all(grad.is_sparse for grad in present):
        present = [grad.to_dense() if grad.is_sparse else grad for grad in present]
    with torch.set_grad_enabled(any(grad.requires_grad for grad in present)):
        total = reduce_tensors(present, variable.targets[0].device)
        if scale != 1.0:
            total = total * scale
            total = total.coalesce() if total.is_sparse else total
        total = apply_hooks(variable.hooks, total)
        for r, target in enumerate(variable.targets):
            mine = total if r == 0 else total.clone().to(target.device)
            accumulate_one(target, mine)


class DeferredGrads(dict[ReplicatedParam, list["Tensor | None"]]):
    """Per variable, each replica's gradient from under ``no_sync``, weighted by its shares."""

    def add(self, variables: Sequence[ReplicatedParam], columns: Sequence[ReplicaGrads]) -> None:
        """Adds the gradients of a pass."""
        for i, variable in enumerate(variables):
            if any(column[i] is not None for column in columns):
                summands = self.setdefault(variable, [None] * len(columns))
                for r, column in enumerate(columns):
                    summands[r] = add_grads(summands[r], column[i])

    def take_with(
        self, variables: Sequence[ReplicatedParam], columns: Sequence[ReplicaGrads]
    ) -> tuple[list[ReplicatedParam], list[ReplicaGrads]]:
        """Returns the gradients of a pass plus all deferred ones, and empties this dict."""
        variables, columns = list(variables), [list(column) for column in columns]
        position = {variable: i for i, variable in enumerate(variables)}
        while self:
            variable, summands = self.popitem()
            if variable not in position:
                position[variable] = len(variables)
                variables.append(variable)
                for column in columns:
                    column.append(None)
            for column, summand in zip(columns, summands, strict=True):
                column[position[variable]] = add_grads(column[position[variable]], summand)
        return variables, columns

    def grads_of(self, variable: ReplicatedParam, replica_id: int) -> Tensor | None:
        """Returns the deferred gradient of one replica."""
        return self[variable][replica_id] if variable in self else None

    def drop(self, variable: ReplicatedParam, replica_ids: Iterable[int]) -> None:
        """Drops the deferred gradients of these replicas."""
        summands = self.get(variable)
        if summands is not None:
            for r in replica_ids:
                summands[r] = None
            if all(summand is None for summand in summands):
                del self[variable]
