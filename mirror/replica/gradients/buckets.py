"""Buckets: gradients that are reduced beside the backward pass that brings the next ones.

[Note: Buckets]
The order in which gradients arrive is learnt from the first pass, cut into buckets, and kept; it
is learnt anew when another one has come twice in a row. On every replica the last parameter of a
bucket has a hook. When it fires and all replicas' gradients of the bucket have arrived, in the
order learnt, the bucket is reduced on the side (``streams.Side``): whoever comes last launches it,
and moves the gradients into a flat buffer before, on the streams of computation, so that theirs is
free for the rest of the pass: [Note: Gradients in flat buffers].
Buckets are launched in one fixed order, and the last one not at all: nothing is left to hide it
behind. So a model of less than a bucket pays nothing.

    replica 0  | forward | backward ......... |
    replica 1  |         | forward | backward 1 2 3 4 |
    beside                                    [1][2][3]
    settled                                            [4]

Whatever does not fit (another order, an unused parameter, a second pass, sparse gradients, hooks,
replicas that sit out or count nothing) is left to the reduction that ends every pass; see
[Note: Lazy gradients]. So is a pass whose gradients a replica has set before all have arrived: the
others' may be those from before. And so are passes of replicas that run at once, when one of them
is in its second: autograd may be adding to the very slots that the bucket would be taken from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, groupby
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from mirror.base.dynamo import disable_dynamo
from mirror.base.timeline import CROSS, EXPOSED, OVERLAPPED, REDUCTION
from mirror.comm.packing import plan_packs
from mirror.device.side_streams import SideStream
from mirror.execution.current_replica import current
from mirror.execution.replicas import Replicas
from mirror.execution.runner import Runner
from mirror.replica.collectives.packed_reducer import Reducer
from mirror.replica.gradients.grad_tracker import GradTracker
from mirror.replica.gradients.non_finite import NonFiniteCheck
from mirror.replica.gradients.ready_grads import (
    ReadyGrads,
    accumulate,
    are_usual,
    common_scale,
    local_grad,
    take,
    unshare,
    weigh,
)
from mirror.replica.params.replicated_param import ReplicaParameter, ReplicatedParam


@dataclass(frozen=True, slots=True)
class _Plan:
    """The order in which gradients arrive, and where the buckets end that are launched."""

    order: ReadyGrads
    ends: list[int]


@dataclass(slots=True)
class _Reduction:
    """One bucket on its way.

    Attributes:
        columns: per replica, the gradients that are being reduced.
        wait: waits for them.
        dropped: those that nobody wants any more, by variable and replica.
    """

    variables: list[ReplicatedParam]
    copies: list[list[ReplicaParameter]]
    targets: list[list[nn.Parameter]]
    columns: list[list[Tensor]]
    wait: Callable[[], None]
    dropped: set[tuple[ReplicatedParam, int]] = field(default_factory=set)


class Buckets:
    """The buckets that gradients are reduced in, and those on their way.

    Args:
        may_launch: whether gradients are to be reduced now, and not kept back.
        finite: what looks whether gradients are; others are left to the end of the pass.

    Attributes:
        on_their_way: the reductions launched and not collected.
        is_disordered: whether gradients have come in another order than that learnt.
    """

    def __init__(
        self,
        replicas: Replicas,
        runner: Runner,
        reducer: Reducer,
        watch: GradTracker,
        may_launch: Callable[[], bool],
        finite: NonFiniteCheck | None,
    ) -> None:
        self._replicas, self._runner, self._reducer = replicas, runner, reducer
        self._watch = watch
        self._are_wanted, self._finite = may_launch, finite
        self._side = SideStream(replicas.places.devices)
        self._streams = watch.streams
        self._plan: _Plan | None = None
        self._hooks: list[Any] = []
        self.on_their_way: list[_Reduction] = []
        self._is_held = False  # until what has arrived is reduced
        self.is_disordered = False

    def learn(self, arrivals: ReadyGrads, *, again: bool) -> None:
        """Takes the order of a pass for that of the next ones.

        Args:
            again: whether the pass before had the same order.
        """
        plan = self._plan
        if not arrivals.is_regular or (plan is not None and arrivals is plan.order):
            return
        if any(not copy.requires_grad for mine in arrivals.copies for copy in mine):
            return  # the next pass will be another one
        if plan is None or again:
            self.forget_order()
            ends = self._ends(arrivals.variables)[:-1]
            self._plan = plan = _Plan(arrivals, ends)
            for index, end in enumerate(ends):
                for copies in arrivals.copies:
                    launch = partial(self._arrived, plan, index)
                    self._hooks.append(copies[end - 1].watch(launch))

    def _ends(self, variables: Sequence[ReplicatedParam]) -> list[int]:
        """Returns where buckets end: each is of one position, whose stream its hook can tell."""
        ends: list[int] = []
        for _, mine in groupby(variables, attrgetter("devices")):
            sizes = [variable.targets[0].nbytes for variable in mine]
            begin = ends[-1] if ends else 0
            ends += [begin + end for end in bucket_ends(sizes, self._reducer.bytes_per_pack)]
        return ends

    def forget_order(self) -> None:
        """Drops the order learnt."""
        for hook in self._hooks:
            hook.remove()
        self._plan, self._hooks, self.is_disordered = None, [], False

    def forget(self, variable: ReplicatedParam) -> None:
        """Drops the order learnt, and what is on its way of a variable that is gone.

        Takes no lock: a garbage collection may come here at any time.
        """
        self.forget_order()
        for reduction in tuple(self.on_their_way):
            if variable in reduction.variables:
                reduction.dropped.update((variable, r) for r in range(len(reduction.targets)))
                reduction.copies = [
                    [copy for copy in mine if copy.variable is not variable]
                    for mine in reduction.copies
                ]

    def close(self) -> None:
        """Ends what reduces on the side; idempotent."""
        self._side.close()

    def drop(self, variable: ReplicatedParam, replica_ids: Iterable[int]) -> None:
        """Has what is on its way for these replicas' copies thrown away when it arrives."""
        with self._watch.lock:
            self._is_held = True
            for reduction in self.on_their_way:
                if variable in reduction.variables:
                    reduction.dropped.update((variable, r) for r in replica_ids)

    def launched(self) -> list[list[ReplicaParameter]]:
        """Returns each replica's copies whose gradients are on their way, in order."""
        if not self.on_their_way:
            return [[] for _ in self._watch.pending]
        parts = [reduction.copies for reduction in self.on_their_way]
        return [[*chain(*(part[r] for part in parts))] for r in range(len(self._watch.pending))]

    def discard(self) -> None:
        """Waits for what is on its way, and throws it away."""
        for reduction in self._take():
            with suppress(Exception):  # whatever it is, the run has failed already
                reduction.wait()
        for unsettled in self._watch.unsettled:  # nobody moves: what is there, is left over
            unsettled.clear()

    def collect(self) -> None:
        """Waits for what is on its way, and accumulates it."""
        timeline = self._replicas.timeline
        for reduction in self._take():
            timeline.begin(CROSS, EXPOSED)
            reduction.wait()
            timeline.end(CROSS, EXPOSED)
            self._runner.unfinished = True  # while some have it: see [Note: Interrupts]
            for r, targets in enumerate(reduction.targets):
                kept = [
                    i
                    for i, variable in enumerate(reduction.variables)
                    if (variable, r) not in reduction.dropped
                ]
                grads = reduction.columns[r]
                accumulate([targets[i] for i in kept], [grads[i] for i in kept])
            self._runner.unfinished = self._runner.running is not None

    def _take(self) -> list[_Reduction]:
        reductions = self.on_their_way
        if reductions:
            self.on_their_way = []
            for unsettled in self._watch.unsettled:
                unsettled[:] = [one for one in unsettled if one is not reductions]
        self._is_held = False
        return reductions

    @disable_dynamo
    def _arrived(self, plan: _Plan, index: int, copy: ReplicaParameter) -> None:
        """Launches a bucket if it is complete and its turn has come."""
        with self._watch.lock:
            if self._streams is not None:
                self._streams.record(copy.replica_id, copy.device)
            if index > len(self.on_their_way):
                before = plan.order.copies[copy.replica_id][plan.ends[index - 1] - 1]
                self.is_disordered |= local_grad(before) is None
            if plan is self._plan and index == len(self.on_their_way) and not self._is_held:
                part = slice(plan.ends[index - 1] if index else 0, plan.ends[index])
                if self._may_launch(copy.variable.devices):
                    with (
                        nullcontext()
                        if self._streams is None
                        else self._streams.make_caller_wait()
                    ):
                        self._launch(plan.order, part)

    def _may_launch(self, devices: Sequence[torch.device]) -> bool:
        if not self._are_wanted():
            return False
        if self._streams is not None and not self._streams.are_complete(devices):
            return False  # a slot is filled before the hook tells on which stream
        running = self._runner.running
        is_alone = running is None or running.lockstep.takes_turns
        return is_alone or not self._watch.may_be_in_second_pass()

    @torch.no_grad()
    def _launch(self, order: ReadyGrads, part: slice) -> None:
        shares = self._shares()
        variables = order.variables[part]
        if shares is None or any(variable.hooks for variable in variables) or order.is_complex:
            return
        copies = [mine[part] for mine in order.copies]
        if not self._watch.are_in_order(copies):
            return
        grads = [list(map(local_grad, mine)) for mine in copies]
        if not all(map(are_usual, grads)):
            return
        if self._finite is not None and not self._finite.all_finite(grads):
            return
        del grads  # who else holds them is about to be counted
        self._watch.remove(copies)
        columns = take(copies)
        moved = self._reducer.move(columns, self._streams)
        unshare(columns, moved.staying)
        scale = common_scale(shares)
        if scale is None:
            scale = 1.0
            weigh(columns, shares)
        name = f"bucket {len(self.on_their_way) + 1}: {len(variables)} parameters"

        def reduce() -> None:
            self._replicas.timeline.begin(OVERLAPPED, REDUCTION, name)
            with torch.no_grad():
                self._reducer.all_reduce(moved, scale)
            self._replicas.timeline.end(OVERLAPPED, REDUCTION)

        targets = [mine[part] for mine in order.targets]
        if not self.on_their_way:
            for unsettled in self._watch.unsettled:
                unsettled.append(self.on_their_way)
        self.on_their_way.append(
            _Reduction(variables, copies, targets, columns, self._side.start(reduce))
        )

    def _shares(self) -> dict[int, float] | None:
        """Returns what each replica's gradient counts for; ``None`` where not all count."""
        replica, running = current.replica, self._runner.running
        num_replicas = self._replicas.num_replicas
        if replica is None:
            return dict.fromkeys(range(num_replicas), 1.0) if running is None else None
        if replica.replicas is not self._replicas or running is None:
            return None
        shares = running.shares()
        return shares if len(shares) == num_replicas and all(shares.values()) else None


def bucket_ends(sizes_bytes: Sequence[int], bytes_per_pack: int) -> list[int]:
    """Cuts a sequence of gradients into buckets; returns where each ends.

    A bucket holds at most ``bytes_per_pack``, the first at most 1 MiB, or one gradient.

        sizes 1 1 3 1 1 1, 3 bytes per pack  ->  2 3 6
    """
    one_kind = [torch.uint8] * len(sizes_bytes)  # a bucket may mix dtypes; packs are made of it
    return [pack[-1] + 1 for pack in plan_packs(sizes_bytes, one_kind, bytes_per_pack)]
