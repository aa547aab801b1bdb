"""Buckets: gradients that are reduced beside the backward pass that brings the next ones.

[Note: Buckets]
The order in which gradients arrive is learnt from the first pass, cut into buckets, and kept; it
is learnt anew when another one has come twice in a row. On every replica the last parameter of a
bucket has a hook. When it fires and all replicas' gradients of the bucket have arrived, in the
order learnt, the bucket is reduced on the side (``devices.Side``): whoever comes last launches it.
Buckets are launched in one fixed order, and the last one not at all: nothing is left to hide it
behind. So a model of less than a bucket pays nothing.

    replica 0  | forward | backward ......... |
    replica 1  |         | forward | backward 1 2 3 4 |
    beside                                    [1][2][3]
    settled                                            [4]

Whatever does not fit (another order, an unused parameter, a second pass, sparse gradients, hooks,
replicas that sit out) is left to the reduction that ends every pass; see [Note: Lazy gradients].
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from operator import is_
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mirror.comm.packing import FIRST_PACK_BYTES
from mirror.context import current
from mirror.devices import Side
from mirror.replica.arrivals import (
    Arrivals,
    accumulate,
    are_usual,
    common_scale,
    local_grad,
    take,
    weigh,
)
from mirror.replica.compiler import opaque
from mirror.timeline import BESIDE, CROSS, EXPOSED, REDUCTION

if TYPE_CHECKING:
    from mirror.replica.group import ReplicaGroup
    from mirror.replica.variables import Variable


@dataclass(slots=True)
class _Reduction:
    """One bucket on its way."""

    variables: list[Variable]
    targets: list[list[nn.Parameter]]
    columns: list[list[Tensor]]
    wait: Callable[[], None]
    dropped: set[tuple[Variable, int]] = field(default_factory=set)


class Buckets:
    """The buckets of a group, and those on their way.

    Attributes:
        num_launched: how many entries of every replica's pending list are on their way.
    """

    def __init__(self, group: ReplicaGroup) -> None:
        self._group = weakref.ref(group)
        self._side = Side(group.devices)
        self._order: Arrivals | None = None
        self._ends: list[int] = []
        self._hooks: list[Any] = []
        self._on_their_way: list[_Reduction] = []
        self._launching = threading.Lock()
        self.num_launched = 0

    def learn(self, arrivals: Arrivals, *, again: bool) -> None:
        """Takes the order of a pass for that of the next ones.

        Args:
            again: whether the pass before had the same order.
        """
        if arrivals is self._order or not arrivals.is_regular:
            return
        if self._order is None or again:
            self.forget()
            self._order = arrivals
            sizes = [variable.targets[0].nbytes for variable in arrivals.variables]
            self._ends = bucket_ends(sizes, self._the_group().bytes_per_pack)[:-1]
            for index, end in enumerate(self._ends):
                for copies in arrivals.copies:
                    register: Any = copies[end - 1].register_post_accumulate_grad_hook
                    launch = partial(self._arrived, index)
                    self._hooks.append(register(launch))

    def forget(self) -> None:
        """Drops the order learnt."""
        for hook in self._hooks:
            hook.remove()
        self._order, self._ends, self._hooks = None, [], []

    def close(self) -> None:
        """Ends what reduces on the side; idempotent."""
        self._side.close()

    def drop(self, variable: Variable, replica_ids: Iterable[int]) -> None:
        """Has what is on its way for these replicas' copies thrown away when it arrives."""
        for reduction in self._on_their_way:
            if variable in reduction.variables:
                reduction.dropped.update((variable, r) for r in replica_ids)

    def discard(self) -> None:
        """Waits for what is on its way, and throws it away."""
        for reduction in self._take():
            with suppress(Exception):  # whatever it is, the run has failed already
                reduction.wait()

    def collect(self) -> None:
        """Waits for what is on its way, and accumulates it."""
        timeline = self._the_group().timeline
        for reduction in self._take():
            timeline.begin(CROSS, EXPOSED)
            reduction.wait()
            timeline.end(CROSS, EXPOSED)
            for r, targets in enumerate(reduction.targets):
                kept = [
                    i
                    for i, variable in enumerate(reduction.variables)
                    if (variable, r) not in reduction.dropped
                ]
                grads = reduction.columns[r]
                accumulate([targets[i] for i in kept], [grads[i] for i in kept])

    def _take(self) -> list[_Reduction]:
        reductions, self._on_their_way, self.num_launched = self._on_their_way, [], 0
        return reductions

    @opaque
    def _arrived(self, index: int, _: Tensor) -> None:
        """Launches a bucket if it is complete and its turn has come."""
        with self._launching:
            if index == len(self._on_their_way) and self._is_complete(index):
                self._launch(index)

    def _is_complete(self, index: int) -> bool:
        order, gradients = self._order, self._the_group().gradients
        begin, end = self.num_launched, self._ends[index]
        if order is None or gradients.deferring or gradients.deferred:
            return False
        return all(
            len(pending) >= end and all(map(is_, pending[begin:end], copies[begin:end]))
            for pending, copies in zip(gradients.pending, order.copies, strict=True)
        )

    @torch.no_grad()
    def _launch(self, index: int) -> None:
        order, group = self._order, self._the_group()
        assert order is not None
        shares = self._shares()
        part = slice(self.num_launched, self._ends[index])
        variables = order.variables[part]
        if shares is None or any(variable.hooks for variable in variables) or order.is_complex:
            return
        copies = [mine[part] for mine in order.copies]
        if not all(are_usual(list(map(local_grad, mine))) for mine in copies):
            return
        columns = take(copies)
        scale = common_scale(shares)
        if scale is None:
            scale = 1.0
            weigh(columns, shares)
        name = f"bucket {index + 1}: {len(variables)} parameters"

        def reduce() -> None:
            group.timeline.begin(BESIDE, REDUCTION, name)
            with torch.no_grad():
                group.all_reduce_lists(columns, scale)
            group.timeline.end(BESIDE, REDUCTION)

        targets = [mine[part] for mine in order.targets]
        self.num_launched = self._ends[index]
        self._on_their_way.append(
            _Reduction(variables, targets, columns, self._side.start(reduce))
        )

    def _shares(self) -> dict[int, float] | None:
        """Returns what each replica's gradient counts for; ``None`` where not all take part."""
        group, replica = self._the_group(), current.replica
        if replica is None:
            every = dict.fromkeys(range(group.num_replicas), 1.0)
            return every if group.running is None else None
        if replica.group is not group or group.running is None:
            return None
        shares = group.running.shares()
        return shares if len(shares) == group.num_replicas else None

    def _the_group(self) -> ReplicaGroup:
        group = self._group()
        assert group is not None
        return group


def bucket_ends(sizes_bytes: Sequence[int], bytes_per_pack: int) -> list[int]:
    """Cuts a sequence of gradients into buckets; returns where each ends.

    A bucket holds at most ``bytes_per_pack``, the first at most 1 MiB, or one gradient.

        sizes 1 1 3 1 1 1, 3 bytes per pack  ->  2 3 6
    """
    ends: list[int] = []
    filled = 0
    for i, size in enumerate(sizes_bytes):
        limit = bytes_per_pack if ends else min(bytes_per_pack, FIRST_PACK_BYTES)
        if filled and filled + size > limit:
            ends.append(i)
            filled = 0
        filled += size
    return [*ends, len(sizes_bytes)] if sizes_bytes else []
