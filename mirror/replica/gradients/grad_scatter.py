"""GradScatter: gradients are reduced to the replica that needs them, and gathered when read.

[Note: Scattered gradients]
With sharded optimizer state a replica updates its slices only, so it needs the reduced gradient
of these alone. The reduction is a ``reduce_scatter`` of the bucket in place of an ``all_reduce``.
With the ``all_gather`` of the new values that moves as many bytes as the ``all_reduce``::

    all_reduce       2 (N - 1) / N of the bucket for each replica
    reduce_scatter     (N - 1) / N          then each replica steps its slices
    all_gather         (N - 1) / N          of the values, after the step

A reduced gradient is in exactly one of two places:

    scattered    ``SlicedGrads.grads`` has each slice's part, on the replica that steps it;
                 ``targets[r].grad`` is None
    gathered     ``targets[r].grad`` of every replica has the whole, as with replicated state

Reading ``p.grad`` gathers all scattered gradients; inside ``run`` that is a merge. So what the
program sees, and may change, is exact, and the step then takes it from ``targets[r].grad``.
Clipping by a global norm and ``GradScaler`` read every gradient: such a step moves half as much
again.

Scattered are the gradients of variables without hooks that an optimizer with slices steps, from
its second step on. All others are reduced to all replicas: sparse gradients, those of
several workers, and sums onto a gradient that was read before. Workers would save nothing: the
``reduce_scatter`` of gloo is an ``all_reduce`` of which a part is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate as running_sums
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mirror.base.timeline import CROSS, REDUCTION
from mirror.comm.packing import chunk_ends
from mirror.device.streams import ReplicaStreams
from mirror.execution.replicas import Replicas
from mirror.replica.gradients.ready_grads import ReplicaGrads, accumulate
from mirror.replica.gradients.slice_exchange import SliceExchange, flat_like, view_flat
from mirror.replica.gradients.slice_plan import ParamSlice
from mirror.replica.params.replicated_param import ReplicatedParam

_MOST_PADDED = 1.5  # times the bytes of the gradients; an all_reduce moves twice as many
_MAX_PLANS = 64


class SlicedGrads:
    """The reduced gradients of one optimizer's slices, each on the replica that steps it.

    Attributes:
        grads: the flat gradient of each slice; ``None`` while it is not scattered.
        of_variable: the positions of each variable's slices.
        dropped: per variable, the replicas that have dropped their gradient inside ``run``.
    """

    def __init__(self, variables: Sequence[ReplicatedParam], slices: Sequence[ParamSlice]) -> None:
        self.variables, self.slices = variables, slices
        self.grads: list[Tensor | None] = [None] * len(slices)
        self.of_variable: dict[ReplicatedParam, list[int]] = {v: [] for v in variables}
        for position, one in enumerate(slices):
            self.of_variable[variables[one.param_index]].append(position)
        self.dropped: dict[ReplicatedParam, set[int]] = {}
        self.dropped_by: set[int] = set()  # all of them

    def drop(self, variable: ReplicatedParam) -> None:
        """Drops the gradient of a variable."""
        for position in self.of_variable[variable]:
            self.grads[position] = None

    def replicas_without(self, variable: ReplicatedParam) -> set[int]:
        """Returns the replicas that have dropped the gradient of a variable."""
        return self.dropped_by | self.dropped.get(variable, set())


class _Group(NamedTuple):
    """Variables of one dtype; their gradients are scattered at once.

    Attributes:
        indices: their positions in the list of variables.
        parts: per replica, the record and the position of its slices, in the order of the buffer.
        sizes: per replica, the elements of its slices.
        begins: per replica, the begin of its chunk of the buffer.
        pieces: the elements of all slices in the order of the variables, or ``None`` if that is
            the order of the buffer, without padding.
        order: per replica, the indices of its pieces.
        length: the elements of a chunk, if pieces are put in another order.
        are_contiguous: whether flat gradients are in the order of rows.
    """

    indices: list[int]
    parts: list[list[tuple[SlicedGrads, int]]]
    sizes: list[list[int]]
    begins: list[int]
    pieces: list[int] | None
    order: list[list[int]]
    length: int
    are_contiguous: bool


class GradScatter:
    """Reduces gradients to the replicas that update them.

    Args:
        wire_dtype: the dtype in which gradients are sent; ``None`` for their own.

    Attributes:
        scattered: the records that have gradients. The same object at all times.
    """

    def __init__(self, replicas: Replicas, wire_dtype: torch.dtype | None) -> None:
        self._replicas, self._wire_dtype = replicas, wire_dtype
        self.scattered: dict[SlicedGrads, None] = {}
        self._records: dict[ReplicatedParam, SlicedGrads] = {}
        self._excluded: dict[ReplicatedParam, None] = {}
        self._plans: dict[tuple[ReplicatedParam, ...], list[_Group] | None] = {}

    # Which variables

    def register(self, record: SlicedGrads) -> None:
        """Scatters the gradients of a record's variables from now on."""
        self._plans.clear()
        for variable in record.variables:
            if variable not in self._excluded:
                self._records[variable] = record

    def unregister(self, record: SlicedGrads) -> None:
        """Gathers the gradients of a record, and scatters no more."""
        self._plans.clear()
        self.gather_record(record)
        for variable in record.variables:
            if self._records.get(variable) is record:
                del self._records[variable]

    def exclude(self, variables: Iterable[ReplicatedParam]) -> None:
        """Gathers these variables' gradients, and scatters them no more.

        An optimizer without slices steps them: it needs them whole.
        """
        self.gather()
        self._plans.clear()
        for variable in variables:
            self._excluded[variable] = None
            self._records.pop(variable, None)

    def forget(self, variable: ReplicatedParam) -> None:
        """Drops a variable that was freed; takes no lock."""
        self._plans.clear()
        self._excluded.pop(variable, None)
        self._records.pop(variable, None)
        for record in tuple(self.scattered):
            if variable in record.of_variable:
                record.drop(variable)
                if not [grad for grad in record.grads if grad is not None]:
                    self.scattered.pop(record, None)

    def prepare_step(self, mine: SlicedGrads) -> bool:
        """Returns whether a record has the gradients for a step of its slices.

        Else they are gathered: another optimizer has slices of the same variables, or some replica
        has set a gradient that the sum has to be added to.
        """
        for record in tuple(self.scattered):
            if record is not mine and not record.of_variable.keys().isdisjoint(mine.variables):
                self.gather_record(record)
        if mine not in self.scattered:
            return False
        set_ones = [v for v in mine.variables for target in v.targets if target.grad is not None]
        if set_ones:
            self.gather_record(mine)
        return not set_ones

    # From local gradients to scattered ones

    def reduce(
        self,
        variables: Sequence[ReplicatedParam],
        targets: Sequence[Sequence[nn.Parameter]],
        by_replica: Sequence[ReplicaGrads],
        scale: float,
        streams: ReplicaStreams | None,
    ) -> list[int]:
        """Scatters the gradients of variables that are stepped in slices.

        Args:
            by_replica: each replica's gradients of the variables: dense, one for each.
            scale: a factor for the sums.
            streams: the streams on which replicas have made them; ``None`` without GPUs.

        Returns:
            The positions of the other variables.
        """
        rest = self.find_whole(variables, targets)
        chosen = variables
        if rest:
            positions = sorted({*range(len(variables))}.difference(rest))
            chosen = [variables[i] for i in positions]
            by_replica = [[grads[i] for i in positions] for grads in by_replica]
        scattering = self.begin(chosen, by_replica, streams) if chosen else None
        if scattering is None:
            return [*range(len(variables))]
        self._replicas.timeline.begin(CROSS, REDUCTION, f"gradients of {len(chosen)} parameters")
        scattering.reduce(self._replicas)
        self._replicas.timeline.end(CROSS, REDUCTION)
        scattering.finish(scale)
        return rest

    def find_whole(
        self, variables: Sequence[ReplicatedParam], targets: Sequence[Sequence[nn.Parameter]]
    ) -> list[int]:
        """Returns the positions of variables that all replicas need whole."""
        records = self._records
        added_to = {i for mine in targets for i, t in enumerate(mine) if t.grad is not None}
        return [
            i
            for i, variable in enumerate(variables)
            if variable not in records or variable.hooks or i in added_to
        ]

    def begin(
        self,
        variables: Sequence[ReplicatedParam],
        by_replica: Sequence[ReplicaGrads],
        streams: ReplicaStreams | None,
    ) -> Scattering | None:
        """Copies gradients into buffers; ``None`` if their slices are too unequal in size.

        Args:
            by_replica: each replica's gradients of the variables: dense, one for each.
            streams: the streams on which replicas have made them; ``None`` without GPUs.
        """
        key = tuple(variables)
        if key not in self._plans:
            if len(self._plans) >= _MAX_PLANS:
                self._plans.clear()
            self._plans[key] = self._plan(variables)
        groups = self._plans[key]
        if groups is None:
            return None
        buffers = []
        with torch.inference_mode(False), torch.no_grad():
            for group in groups:
                buffers.append(
                    [self._fill(group, grads, variables, r) for r, grads in enumerate(by_replica)]
                )
        if streams is not None:
            made = [list(mine) for mine in zip(*buffers, strict=True)]
            streams.keep(by_replica, made)
        dtypes = [by_replica[0][group.indices[0]].dtype for group in groups]
        return Scattering(self, groups, buffers, dtypes)

    def _fill(
        self,
        group: _Group,
        grads_of_replica: ReplicaGrads,
        variables: Sequence[ReplicatedParam],
        replica_id: int,
    ) -> Tensor:
        grads = [grads_of_replica[i] for i in group.indices]
        if group.are_contiguous:
            rows = list(map(Tensor.ravel, grads))
        else:
            rows = [
                flat_like(grad, variables[i].targets[replica_id])
                for i, grad in zip(group.indices, grads, strict=True)
            ]
        buffer = torch.cat(rows)
        if group.pieces is not None:
            pieces = buffer.split_with_sizes(group.pieces)
            parts: list[Tensor] = []
            for order, sizes in zip(group.order, group.sizes, strict=True):
                parts += [pieces[i] for i in order]
                parts.append(buffer.new_zeros(group.length - sum(sizes)))
            buffer = torch.cat(parts)
        return buffer if self._wire_dtype is None else buffer.to(self._wire_dtype)

    def _plan(self, variables: Sequence[ReplicatedParam]) -> list[_Group] | None:
        by_dtype: dict[torch.dtype, list[int]] = {}
        for i, variable in enumerate(variables):
            by_dtype.setdefault(variable.targets[0].dtype, []).append(i)
        groups = [self._plan_group(variables, indices) for indices in by_dtype.values()]
        padded = sum(group.length for group in groups) * self._replicas.num_replicas
        total = sum(sum(map(sum, group.sizes)) for group in groups)
        return None if padded > max(_MOST_PADDED * total, total + 1024) else groups

    def _plan_group(self, variables: Sequence[ReplicatedParam], indices: list[int]) -> _Group:
        num_replicas = self._replicas.num_replicas
        parts: list[list[tuple[SlicedGrads, int]]] = [[] for _ in range(num_replicas)]
        sizes: list[list[int]] = [[] for _ in range(num_replicas)]
        order: list[list[int]] = [[] for _ in range(num_replicas)]
        pieces: list[int] = []
        replica_ids: list[int] = []
        for i in indices:
            record = self._records[variables[i]]
            for position in record.of_variable[variables[i]]:
                one = record.slices[position]
                parts[one.replica_id].append((record, position))
                sizes[one.replica_id].append(one.stop - one.start)
                order[one.replica_id].append(len(pieces))
                pieces.append(one.stop - one.start)
                replica_ids.append(one.replica_id)
        ends = chunk_ends(sum(pieces), num_replicas)
        are_chunks = [*running_sums(map(sum, sizes))] == ends
        is_direct = are_chunks and replica_ids == sorted(replica_ids)
        length = max(map(sum, sizes))
        return _Group(
            indices,
            parts,
            sizes,
            [0, *ends[:-1]] if is_direct else [r * length for r in range(num_replicas)],
            None if is_direct else pieces,
            order,
            length,
            all(target.is_contiguous() for i in indices for target in variables[i].targets),
        )

    def add(self, group: _Group) -> None:
        """Notes that the records of a group have gradients."""
        for parts in group.parts:
            for record, _ in parts:
                self.scattered[record] = None

    # From scattered gradients to gathered ones

    @torch.no_grad()
    def gather(self) -> None:
        """Gives every replica the whole of all scattered gradients."""
        for record in tuple(self.scattered):
            self.gather_record(record)

    @torch.no_grad()
    def gather_record(self, record: SlicedGrads) -> None:
        """Gives every replica the whole of a record's gradients, unless it has dropped them."""
        if record not in self.scattered:
            return
        found = [v for v in record.variables if self._has(record, v)]
        if found:
            with torch.inference_mode(False):
                self._gather(record, found)
        self._forget_grads(record)

    def _has(self, record: SlicedGrads, variable: ReplicatedParam) -> bool:
        """Whether a variable has a scattered gradient, which fits today's shape."""
        positions = record.of_variable[variable]
        parts = [record.grads[position] for position in positions]
        total = sum(part.numel() for part in parts if part is not None)
        return parts[0] is not None and total == variable.targets[0].numel()

    def _gather(self, record: SlicedGrads, variables: Sequence[ReplicatedParam]) -> None:
        replicas = self._replicas
        views: list[list[Tensor]] = [list(record.grads) for _ in replicas.devices]  # type: ignore[arg-type]
        wholes: list[list[Tensor]] = []
        positions: list[int] = []
        for r, own in enumerate(views):
            wholes.append([])
            for variable in variables:
                whole = torch.empty_like(variable.targets[r], requires_grad=False)
                wholes[r].append(whole)
                elements = view_flat(whole)
                for i in record.of_variable[variable]:
                    one = record.slices[i]
                    own[i] = elements[one.start : one.stop]
                    if one.replica_id == r:
                        part = record.grads[i]
                        assert part is not None
                        own[i].copy_(part)
                        positions.append(i)
        SliceExchange(replicas, record.slices, views, sorted(positions)).all_gather()
        for r, mine in enumerate(wholes):
            for variable, whole in zip(variables, mine, strict=True):
                if r not in record.replicas_without(variable):
                    accumulate([variable.targets[r]], [whole])

    def _forget_grads(self, record: SlicedGrads) -> None:
        self.scattered.pop(record, None)
        record.grads = [None] * len(record.slices)
        record.dropped_by.clear()
        record.dropped.clear()

    # Dropping

    def has(self, replica_id: int) -> bool:
        """Whether a replica that reads a gradient may find one that is scattered."""
        return any(replica_id not in record.dropped_by for record in tuple(self.scattered))

    def drop_all_of(self, variables: Sequence[ReplicatedParam], replica_id: int | None) -> None:
        """Drops the gradients of variables for one replica, or for all outside ``run``."""
        for record in tuple(self.scattered):
            if record.variables is variables:
                if replica_id is None:
                    self._forget_grads(record)
                else:
                    record.dropped_by.add(replica_id)
                return
        replica_ids = range(self._replicas.num_replicas) if replica_id is None else (replica_id,)
        for variable in variables:
            self.drop(variable, replica_ids)

    def drop(self, variable: ReplicatedParam, replica_ids: Iterable[int]) -> None:
        """Drops the gradient of one variable for these replicas."""
        for record in tuple(self.scattered):
            if variable in record.of_variable:
                dropped = record.dropped.setdefault(variable, set())
                dropped.update(replica_ids)
                if len(dropped) == self._replicas.num_replicas:  # several replicas may see it
                    record.drop(variable)
                    record.dropped.pop(variable, None)

    def settle(self, active: Iterable[int]) -> None:
        """Ends what replicas have dropped inside ``run``, where all of them have arrived.

        A gradient that all active replicas have dropped is gone. One that some have kept is given
        to these, as with replicated state.
        """
        everyone = set(active)
        for record in tuple(self.scattered):
            if everyone <= record.dropped_by:
                self._forget_grads(record)
            elif record.dropped_by:
                self.gather_record(record)
            for variable, dropped in tuple(record.dropped.items()):
                if everyone <= dropped:
                    record.drop(variable)
                    record.dropped.pop(variable, None)
                elif dropped:
                    self.gather_record(record)
                    break

    def follow_first(self) -> None:
        """Makes what the first replica has dropped that of all, after a failure."""
        self.settle((0,))


class Scattering:
    """Gradients in flat buffers that are being scattered."""

    def __init__(
        self,
        scatter: GradScatter,
        groups: Sequence[_Group],
        buffers: Sequence[Sequence[Tensor]],
        dtypes: Sequence[torch.dtype],
    ) -> None:
        self._scatter, self._groups, self._buffers = scatter, groups, buffers
        self._dtypes = dtypes

    def weigh(self, shares: Mapping[int, float]) -> None:
        """Multiplies each replica's gradients by its share."""
        for buffers in self._buffers:
            for r, buffer in enumerate(buffers):
                buffer.mul_(shares[r])

    def reduce(self, replicas: Replicas) -> None:
        """Sums the gradients over the replicas; each gets those of its slices."""
        for buffers in self._buffers:
            replicas.communicator.reduce_scatter(buffers)

    def finish(self, scale: float) -> None:
        """Multiplies the sums by ``scale``, and adds them to the scattered gradients."""
        for group, buffers, dtype in zip(self._groups, self._buffers, self._dtypes, strict=True):
            for begin, sizes, parts, buffer in zip(
                group.begins, group.sizes, group.parts, buffers, strict=True
            ):
                if not sizes:
                    continue
                chunk = buffer[begin : begin + sum(sizes)].to(dtype, copy=True)
                if scale != 1.0:
                    chunk.mul_(scale)
                _add(parts, chunk.split_with_sizes(sizes))
            self._scatter.add(group)


def _add(parts: Sequence[tuple[SlicedGrads, int]], grads: Sequence[Tensor]) -> None:
    sums, summands = [], []
    for (record, position), grad in zip(parts, grads, strict=True):
        known = record.grads[position]
        if known is None:
            record.grads[position] = grad
        else:
            sums.append(known)
            summands.append(grad)
    if sums:
        torch._foreach_add_(sums, summands)
