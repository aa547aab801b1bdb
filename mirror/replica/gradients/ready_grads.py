"""Lists of gradients: ReadyGrads are those of a pass, Reducer sums them over the replicas.

The file follows a gradient from its slot to ``.grad``: it is recorded (``ReadyGrads``), taken out
of the slot, weighted, changed by hooks and accumulated. Functions for gradients that are not dense
follow: sparse, complex, with a graph, or absent. ``DeferredGrads`` keeps gradients under
``no_sync``. ``Reducer`` sums in packs, which may be sent in another dtype.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, repeat
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mirror.base.torch_private import num_sharers
from mirror.comm.host_backends import HostCommunicator, host_missing_reason
from mirror.comm.packing import move_into_flats
from mirror.comm.reduce_ops import reduce_tensors
from mirror.device.streams import ReplicaStreams
from mirror.execution.replicas import Replicas
from mirror.replica.params.mirrored_tensor import GRAD
from mirror.replica.params.replicated_param import (
    ReplicaParameter,
    ReplicatedParam,
    apply_hooks,
    refuse_sparse,
)
from mirror.values import are_identical

ReplicaGrads = list[Any]  # the local gradients of one replica; None where it has none

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

    __slots__ = (
        *("_arrived", "_in_order", "_rest", "_sizes", "copies", "is_complex", "is_regular"),
        *("targets", "variables"),
    )

    def __init__(self, arrived: Sequence[Sequence[ReplicaParameter]]) -> None:
        self._arrived = tuple(map(tuple, arrived))
        self._sizes, self._in_order = list(map(len, arrived)), tuple(chain(*arrived))
        self._rest: tuple[int, ReadyGrads] | None = None
        self.variables = list(dict.fromkeys(copy.variable for copy in chain(*arrived)))
        self.copies = [[v.copies[r] for v in self.variables] for r in range(len(arrived))]
        self.targets = [[v.targets[r] for v in self.variables] for r in range(len(arrived))]
        self.is_complex = any(v.copies[0].is_complex() for v in self.variables)
        self.is_regular = all(map(are_identical, self._arrived, self.copies))

    def are_ready(self, arrived: Sequence[Sequence[ReplicaParameter]]) -> bool:
        """Whether the same copies have arrived in the same order."""
        return list(map(len, arrived)) == self._sizes and all(
            map(is_, chain(*arrived), self._in_order)
        )

    def skip(self, num_taken: int) -> ReadyGrads:
        """Returns the arrivals without the first ``num_taken`` of every replica."""
        if self._rest is None or self._rest[0] != num_taken:
            self._rest = (num_taken, ReadyGrads([copies[num_taken:] for copies in self._arrived]))
        return self._rest[1]


def take(copies: Sequence[Sequence[ReplicaParameter]]) -> list[ReplicaGrads]:
    """Takes the local gradients out of the slots of copies; returns a list per replica."""
    by_replica: list[ReplicaGrads] = []
    for mine in copies:
        by_replica.append(list(map(local_grad, mine)))
        deque(map(set_local_grad, mine, repeat(None)), maxlen=0)
    return by_replica


def unshare(
    by_replica: list[ReplicaGrads], positions: Sequence[int], streams: ReplicaStreams | None
) -> None:
    """Clones gradients that share their memory, so that it can be written.

    During a backward pass another gradient may lie in the same memory: the gradient of ``p`` in
    ``x + p.view(1, -1)`` is a view of that of ``x``. Autograd counts holders of the tensor only,
    not of its memory.

    Args:
        positions: the indices of the gradients that will be written.
        streams: the streams on which replicas may use the clones; ``None`` without GPUs.
    """
    shared: list[ReplicaGrads] = [[] for _ in by_replica]
    clones: list[ReplicaGrads] = [[] for _ in by_replica]
    for r, grads in enumerate(by_replica):
        counts = num_sharers([grads[i] for i in positions])
        for i, sharers in zip(positions, counts, strict=True):
            if sharers:
                shared[r].append(grads[i])
                grads[i] = grads[i].clone()
                clones[r].append(grads[i])
    if streams is not None:
        streams.keep(shared, clones)


def common_scale(shares: Mapping[int, float]) -> float | None:
    """Returns the share that all replicas have; ``None`` where they differ."""
    different = set(shares.values())
    return different.pop() if len(different) == 1 else None


def weigh(by_replica: list[ReplicaGrads], shares: Mapping[int, float]) -> None:
    """Multiplies each replica's gradients by its share, in place where that is possible."""
    for r, grads in enumerate(by_replica):
        share = shares.get(r, 0.0)
        if share == 0.0:  # dropped, since 0 * NaN is NaN
            grads[:] = [None] * len(grads)
        present = [grad for grad in grads if grad is not None]
        if present and share != 1.0:
            if any(grad.requires_grad or grad.is_sparse for grad in present):
                grads[:] = [None if grad is None else _scale(grad, share) for grad in grads]
            else:
                torch._foreach_mul_(present, share)


def _scale(grad: Tensor, share: float) -> Tensor:
    with torch.set_grad_enabled(grad.requires_grad):  # keeps the graph of create_graph=True
        return grad * share


def are_usual(grads: Iterable[Tensor | None]) -> bool:
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
    found = [*map(GRAD.__get__, targets)]
    for grad in found:
        if grad is not None:
            break
    else:
        deque(map(GRAD.__set__, targets, reduced), maxlen=0)
        return
    if are_usual(found):
        torch._foreach_add_(found, list(reduced))
        return
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


def run_hooks(variables: Sequence[ReplicatedParam], by_replica: Sequence[ReplicaGrads]) -> None:
    """Calls the gradient hooks of variables, and replaces the reduced gradients by the results.

    Args:
        by_replica: per replica, the reduced gradients of ``variables``. Hooks get replica 0's.
    """
    for i, variable in enumerate(variables):
        if variable.hooks:
            home, device = variable.home.device, by_replica[0][i].device
            grad = apply_hooks(variable.hooks, by_replica[0][i].to(home))
            by_replica[0][i] = grad.to(device)
            for grads in by_replica[1:]:
                grads[i] = grad.to(grads[i].device, copy=True)


def are_non_dense(grads: Sequence[Tensor | None]) -> bool:
    """Whether a communicator cannot take one of a variable's gradients."""
    return any(g is not None and (g.is_sparse or g.requires_grad or g.is_complex()) for g in grads)


def sum_present(grads: Sequence[Tensor | None], device: torch.device) -> Tensor | None:
    """Returns the sum of gradients, sparse if all are; ``None`` if all are absent."""
    present = [grad for grad in grads if grad is not None]
    if not all(grad.is_sparse for grad in present):
        present = [grad.to_dense() if grad.is_sparse else grad for grad in present]
    return reduce_tensors(present, device) if present else None


def reduce_non_dense(
    variable: ReplicatedParam, grads: Sequence[Tensor | None], scale: float
) -> None:
    """Reduces one variable's gradients that are sparse, complex or carry a graph, into ``.grad``.

    The sum is sparse if all gradients are, and keeps their graphs.
    """
    refuse_sparse(variable.home, variable.name)
    with torch.set_grad_enabled(any(grad is not None and grad.requires_grad for grad in grads)):
        total = sum_present(grads, variable.targets[0].device)
        assert total is not None
        if scale != 1.0:
            total = total * scale
            total = total.coalesce() if total.is_sparse else total
        total = apply_hooks(variable.hooks, total)
        for r, target in enumerate(variable.targets):
            mine = total if r == 0 else total.clone().to(target.device)
            accumulate_one(target, mine)


class DeferredGrads(dict[ReplicatedParam, list["Tensor | None"]]):
    """Per variable, each replica's gradient from under ``no_sync``, weighted by its shares.

    Attributes:
        is_open: whether a ``no_sync`` is open.
        has_passes: whether passes were deferred since the last reduction. With several workers it
            is the same on all, even if a worker's passes had no gradients.
    """

    def __init__(self, *, is_multi_process: bool = False) -> None:
        super().__init__()
        self._is_multi_process = is_multi_process
        self.is_open = self.has_passes = False

    def add(
        self, variables: Sequence[ReplicatedParam], by_replica: Sequence[ReplicaGrads]
    ) -> None:
        """Adds the gradients of a pass."""
        for i, variable in enumerate(variables):
            if any(grads[i] is not None for grads in by_replica):
                summands = self.setdefault(variable, [None] * len(by_replica))
                for r, grads in enumerate(by_replica):
                    summands[r] = add_grads(summands[r], grads[i])
        self.has_passes = self._is_multi_process or bool(self)

    def take_all(self) -> tuple[list[ReplicatedParam], list[ReplicaGrads]]:
        """Removes and returns all variables, and each replica's gradients of them."""
        variables, by_replica = list(self), [*map(list, zip(*self.values(), strict=True))]
        self.release()
        return variables, by_replica

    def grads_of(self, variable: ReplicatedParam, replica_id: int) -> Tensor | None:
        """Returns the deferred gradient of one replica."""
        return self[variable][replica_id] if variable in self else None

    def is_sparse(self, variable: ReplicatedParam) -> bool:
        """Whether a summand of a variable is sparse."""
        summands = self.get(variable, ())
        return any(summand is not None and summand.is_sparse for summand in summands)

    def pop_dense(self, variable: ReplicatedParam) -> list[Tensor | None]:
        """Removes and returns a variable's summands; none if some are sparse."""
        return [] if self.is_sparse(variable) else self.pop(variable, [])

    def drop(self, variable: ReplicatedParam, replica_ids: Iterable[int]) -> None:
        """Drops the deferred gradients of these replicas."""
        summands = self.get(variable)
        if summands is not None:
            for r in replica_ids:
                summands[r] = None
            if all(summand is None for summand in summands):
                self.forget(variable)

    def forget(self, variable: ReplicatedParam) -> None:
        """Drops the deferred gradients of a variable; takes no lock."""
        if self.pop(variable, None) is not None and not self._is_multi_process:
            self.has_passes = bool(self)

    def release(self) -> None:
        """Drops all deferred gradients."""
        self.has_passes = False
        self.clear()


class MovedTensors(NamedTuple):
    """Gradients in the memory where they are reduced, one list per replica.

    Attributes:
        columns: each replica's gradients; those that were packed are views of ``buffers``.
        buffers: each replica's flat buffers.
        staying: the positions of gradients that were not packed.
    """

    columns: Sequence[list[Tensor]]
    buffers: Sequence[Sequence[Tensor]]
    staying: Sequence[int]


class Reducer:
    """Sums gradients over the replicas.

    Args:
        bytes_per_pack: the most bytes that one collective sums.
        wire_dtype: the dtype in which floating tensors are sent; ``None`` for their own.

    Attributes:
        is_on_host: whether the host library sums, or would sum with several replicas.
    """

    def __init__(
        self, replicas: Replicas, bytes_per_pack: int, wire_dtype: torch.dtype | None
    ) -> None:
        self._replicas = replicas
        self.wire_dtype = wire_dtype
        self.bytes_per_pack = bytes_per_pack
        alone = replicas.are_simulated and replicas.num_replicas == 1
        of_host = isinstance(replicas.communicator, HostCommunicator)
        self.is_on_host = (alone or of_host) and host_missing_reason() is None

    @property
    def packs(self) -> bool:
        """Whether gradients are reduced in flat buffers."""
        return self.wire_dtype is None and self._replicas.communicator.packs

    def move(
        self, columns: Sequence[list[Tensor]], streams: ReplicaStreams | None
    ) -> MovedTensors:
        """Moves gradients into flat buffers, if the backend packs; views replace them in place.

        Gradients that are sent in another dtype stay: the conversion packs them anyway.

        Args:
            streams: the streams on which replicas may use the buffers; ``None`` without GPUs.
        """
        if self.wire_dtype is not None or not self._replicas.communicator.packs:
            return MovedTensors(columns, [], range(len(columns[0])))
        before = [] if streams is None else [list(column) for column in columns]
        # The first read may happen in inference mode: such tensors cannot be changed later.
        with torch.inference_mode(False), torch.no_grad():
            moved = MovedTensors(columns, *move_into_flats(columns, self.bytes_per_pack))
        if streams is not None:
            staying = set(moved.staying)
            gone = [[t for i, t in enumerate(mine) if i not in staying] for mine in before]
            streams.keep(gone, moved.buffers)
        return moved

    def all_reduce(self, moved: MovedTensors, scale: float) -> None:
        """Sums the gradients over the replicas, in place, and multiplies by ``scale``."""
        columns, buffers, staying = moved
        communicator, bytes_per_pack = self._replicas.communicator, self.bytes_per_pack
        for pack in zip(*buffers, strict=True):
            communicator.all_reduce(pack, "sum", scale)
        if not staying:
            return
        if any(buffers):  # then what stays fits into no pack
            columns = [list(map(column.__getitem__, staying)) for column in columns]
            bytes_per_pack = 0
        communicator.all_reduce_checked(columns, "sum", scale, bytes_per_pack, self.wire_dtype)
