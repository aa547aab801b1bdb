"""LocalReduction: reduces the gradients of the replicas of one process; Buckets begin in the pass.

``Buckets`` launch the reduction of gradients while the backward pass still computes the next ones.
The rest is reduced at the first use of a gradient: all dense gradients at once, sparse ones one by
one. When that is: [Note: Lazy gradients] in ``grad_reducer.py``.

[Note: Buckets]
The first pass records the order in which gradients arrive. The order is cut into buckets, and
recorded again when another order has come twice in a row. On every replica the last parameter of a
bucket has a hook. When the gradients of all replicas have arrived, in this order, the replica that
comes last launches the bucket. First it moves the gradients into a flat buffer, on the compute
streams, which frees their memory for the rest of the pass: ``ready_grads.py``. Then
a ``SideStream`` reduces the buffer. Buckets are launched in one fixed order. The last bucket is
reduced when the pass has ended, since no computation is left to overlap with. So a model smaller
than one bucket has no overhead.

    replica 0  | forward | backward ......... |
    replica 1  |         | forward | backward 1 2 3 4 |
    overlapped                                [1][2][3]
    at the end                                         [4]

All other cases are left to the reduction at the end of the pass, see [Note: Lazy gradients]:
another order, an unused parameter, sparse gradients, hooks, idle replicas and replicas of weight
0. Also a pass in which a replica sets a gradient before all have arrived, as the other replicas'
gradients may be older. Also a second pass of a replica while others still run, or outside ``run``,
where autograd has a thread for each GPU: it may be adding to the slots from which the bucket would
be taken. Also a forward pass with streams of its own: a bucket's hook sees one stream, and the
engine makes it wait for the others only when the pass ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, compress, groupby
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from mirror.base.dynamo import disable_dynamo
from mirror.base.timeline import CROSS, EXPOSED, OVERLAPPED, REDUCTION
from mirror.comm.packing import plan_packs
from mirror.device.streams import SideStream
from mirror.execution.replicas import Replicas
from mirror.execution.runner import Runner
from mirror.replica.gradients.grad_scatter import GradScatter, Scattering
from mirror.replica.gradients.grad_tracker import GradTracker
from mirror.replica.gradients.non_finite import NonFiniteCheck
from mirror.replica.gradients.packed_grads import PackedGrads
from mirror.replica.gradients.ready_grads import (
    DeferredGrads,
    ReadyGrads,
    Reducer,
    ReplicaGrads,
    accumulate,
    are_non_dense,
    are_usual,
    local_grad,
    reduce_non_dense,
    run_hooks,
    take,
    unshare,
    weigh,
)
from mirror.replica.gradients.shares import PassWeights, Shares
from mirror.replica.params.replicated_param import ReplicaParameter, ReplicatedParam, refuse_sparse

_hooks_of = attrgetter("hooks")


class LocalReduction:
    """Reduces the gradients of the replicas of one process: see ``Reduction``.

    Args:
        finite: checks gradients before they are reduced; ``None`` for no check.
    """

    def __init__(
        self,
        replicas: Replicas,
        runner: Runner,
        reducer: Reducer,
        shares: Shares,
        finite: NonFiniteCheck | None,
    ) -> None:
        self._replicas, self._runner, self._reducer = replicas, runner, reducer
        self._finite = finite
        self.bytes_per_pack = reducer.bytes_per_pack
        self.tracker, self.deferred = GradTracker(replicas), DeferredGrads()
        self.scatter: GradScatter | None = None
        if replicas.shards_state:
            self.scatter = GradScatter(replicas, reducer.wire_dtype)
        self._buckets = Buckets(
            replicas, runner, reducer, self.tracker, shares, self.deferred, finite, self.scatter
        )

    def order_of_arrival(self) -> Sequence[ReplicatedParam]:
        """Returns the variables in the order in which gradients have last arrived, if known."""
        arrivals = self.tracker.arrivals
        return () if arrivals is None else arrivals.variables

    @torch.no_grad()
    def reduce(self, weights: PassWeights) -> None:
        """Sums the local gradients, weighted, into every replica's ``.grad``."""
        if self.scatter is not None and self.scatter.scattered:
            self.scatter.settle(weights)
        if self.tracker.packed.unreduced and self._reduce_packed(weights):
            return
        # 1. Take the gradients out of their slots, and wait for the buckets in flight.
        adds_deferred = self.deferred.has_passes
        arrivals, by_replica = self._take(weights)
        if self._buckets.in_flight or self._buckets.is_held:
            self._buckets.collect()
        # 2. Weigh them. The sum is multiplied by a share that all replicas have.
        variables, targets = arrivals.variables, arrivals.targets
        scale = None if adds_deferred else weights.common
        if scale is None:
            scale = 1.0
            weigh(by_replica, weights)
        # 3. Reduce those that are not dense, and those that are stepped in slices.
        is_usual = not arrivals.is_complex and are_usual(chain(*by_replica))
        if adds_deferred or not is_usual:
            variables, by_replica = self._reduce_unusual(variables, by_replica, scale)
            targets = [[v.targets[r] for v in variables] for r in range(len(by_replica))]
        if variables and self.scatter is not None:
            streams = self.tracker.streams
            rest = self.scatter.reduce(variables, targets, by_replica, scale, streams)
            if rest:
                variables = [variables[i] for i in rest]
                by_replica = [[grads[i] for i in rest] for grads in by_replica]
                targets = [[mine[i] for i in rest] for mine in targets]
            else:
                variables, by_replica, targets = [], [], []
        # 4. Sum the others, and add the sums to every replica's gradients.
        if variables:
            timeline, name = self._replicas.timeline, f"gradients of {len(variables)} parameters"
            timeline.mark((timeline.clock(), CROSS, REDUCTION, name))
            self._reducer.all_reduce(self._reducer.move(by_replica, self.tracker.streams), scale)
            timeline.mark((timeline.clock(), CROSS, REDUCTION, None))
            if any(map(_hooks_of, variables)):
                run_hooks(variables, by_replica)
        self._runner.unfinished = True  # some replicas have it, some not: [Note: Interrupts]
        for mine, reduced in zip(targets, by_replica, strict=True):
            accumulate(mine, reduced)
        self._runner.unfinished = self._runner.running is not None
        if self.tracker.streams is not None:
            self.tracker.forget_streams()

    def pack(self, variables: Sequence[ReplicatedParam]) -> PackedGrads | None:
        """Returns memory for the gradients of variables, where they are reduced in place.

        ``None`` if they are to be moved first: they are checked, or reduced in slices, or complex.
        """
        have_one_layout = all(
            target.stride() == v.targets[0].stride() and target.dtype == v.targets[0].dtype
            for v in variables
            for target in v.targets
        )
        if self._finite is not None or self.scatter is not None or not have_one_layout:
            return None
        if any(v.targets[0].is_complex() for v in variables):
            return None
        wanted = set(variables)
        in_order = [v for v in self.order_of_arrival() if v in wanted]
        if len(in_order) < len(wanted):
            in_order = [*dict.fromkeys(reversed(variables))]
        self.tracker.packed.may_be = True
        return PackedGrads(
            self.tracker.packed,
            in_order,
            self._buckets.bucket_ends_of(in_order),
            self.bytes_per_pack if self._reducer.packs else None,
        )

    def _reduce_packed(self, weights: PassWeights) -> bool:
        """Reduces the gradients of a packed pass in place; returns whether that is done."""
        (packed,) = self.tracker.packed.unreduced
        variables = packed.variables
        is_alone = not (any(self.tracker.pending) or self.tracker.in_flight)
        scale = weights.common
        if self.deferred.has_passes or not (is_alone and scale) or any(map(_hooks_of, variables)):
            self.tracker.packed.unpack()
            return False
        self.tracker.packed.unreduced.clear()
        packed.arrived.clear()
        self.tracker.clear()
        timeline, name = self._replicas.timeline, f"gradients of {len(variables)} parameters"
        timeline.mark((timeline.clock(), CROSS, REDUCTION, name))
        for moved in packed.moved:
            self._reducer.all_reduce(moved, scale)
        timeline.mark((timeline.clock(), CROSS, REDUCTION, None))
        self._runner.unfinished = True  # some replicas have it, some not: [Note: Interrupts]
        for targets, reduced in zip(packed.arrivals.targets, packed.columns, strict=True):
            accumulate(targets, reduced)
        self._runner.unfinished = self._runner.running is not None
        if packed not in self.tracker.packed.lent:
            self.tracker.packed.lent.append(packed)
        if self.tracker.streams is not None:
            self.tracker.streams.keep([()] * len(packed.columns), packed.columns)
            self.tracker.forget_streams()
        return True

    def _take(self, weights: PassWeights) -> tuple[ReadyGrads, list[ReplicaGrads]]:
        """Takes the local gradients out of their slots.

        Returns:
            The copies, without those of buckets in flight, and the gradients of each replica.

        Raises:
            GradientError: a gradient is not finite, and ``finite`` checks that.
        """
        arrivals, is_known = self.tracker.record_arrival_order()
        rest = arrivals
        if self.tracker.in_flight:
            rest = arrivals.skip(sum([len(bucket.copies[0]) for bucket in self.tracker.in_flight]))
        if self._finite is not None:
            grads = [
                list(map(local_grad, mine)) if weights.get(r) else []  # of weight 0: not checked
                for r, mine in enumerate(rest.copies)
            ]
            if not self._finite.all_finite(grads):
                self.discard()
                self._finite.raise_error(grads, rest.variables)
            del grads  # unshare counts the references to their memory
        if arrivals is not self._buckets.order or self.tracker.streams is not None:
            self._buckets.record_order(arrivals, again=is_known)
        if self._buckets.is_disordered:
            self._buckets.forget_order()
            self.tracker.restore_hooks()
        taken = take(rest.copies)
        self.tracker.clear()  # last, so that gradients are found again after an interrupt
        return rest, taken

    def _reduce_unusual(
        self, variables: list[ReplicatedParam], by_replica: list[ReplicaGrads], scale: float
    ) -> tuple[list[ReplicatedParam], list[ReplicaGrads]]:
        """Reduces sparse and other non-dense gradients; returns the rest, filled with zeros."""
        if self.deferred.has_passes:
            self.deferred.add(variables, by_replica)
            variables, by_replica = self.deferred.take_all()
        usual = []
        for position, variable in enumerate(variables):
            grads = [grads_of_replica[position] for grads_of_replica in by_replica]
            if all(grad is None for grad in grads):
                continue
            if are_non_dense(grads):
                reduce_non_dense(variable, grads, scale)
            else:
                usual.append(position)
        filled: list[ReplicaGrads] = [[] for _ in by_replica]
        for r, grads_of_replica in enumerate(by_replica):
            for position in usual:
                grad = grads_of_replica[position]
                if grad is None:
                    grad = torch.zeros_like(variables[position].targets[r])
                filled[r].append(grad)
        return [variables[i] for i in usual], filled

    @torch.no_grad()
    def defer(self, weights: PassWeights) -> None:
        """Moves the local gradients, weighted, to ``deferred``."""
        self.tracker.packed.unpack()
        arrivals, by_replica = self._take(weights)
        self._buckets.collect()
        weigh(by_replica, weights)
        self.deferred.add(arrivals.variables, by_replica)
        self.tracker.forget_streams()

    def drop(self, variable: ReplicatedParam, replica_ids: Sequence[int]) -> bool:
        """Drops a variable's unreduced gradients, for these replicas; returns False."""
        pending, unsettled = self.tracker.pending, self.tracker.unsettled
        sources = [pending[r] or unsettled[r] for r in replica_ids]
        if self.tracker.unsearched or any(sources) or self.tracker.in_flight:
            self._buckets.drop(variable, replica_ids)  # first: no bucket takes others meanwhile
        self.tracker.drop_local(variable, replica_ids)
        self.deferred.drop(variable, replica_ids)
        if self.scatter is not None and self.scatter.scattered:
            self.scatter.drop(variable, replica_ids)
        return False

    def discard(self) -> None:
        """Drops all gradients that are not reduced."""
        self._buckets.discard()
        self.tracker.discard()

    def forget(self, variable: ReplicatedParam) -> None:
        """Drops the unreduced gradients of a variable that was freed; takes no lock."""
        if self.scatter is not None:
            self.scatter.forget(variable)
        self._buckets.forget(variable)

    def close(self) -> None:
        """Closes the side stream; idempotent."""
        self._buckets.close()


@dataclass(frozen=True, slots=True)
class _Plan:
    """The order in which gradients arrive, and the ends of the buckets that hooks launch."""

    order: ReadyGrads
    ends: list[int]

    def bounds(self, index: int) -> slice:
        """Returns the positions of a bucket in the order."""
        return slice(self.ends[index - 1] if index else 0, self.ends[index])


@dataclass(slots=True)
class _Reduction:
    """One bucket in flight.

    Attributes:
        by_replica: the gradients that are being reduced.
        wait: waits for the reduction.
        scale: a factor for the sums that are scattered.
        scattering: the reduction, if it gives each replica a part of the gradients.
        dropped: their reduced gradients are thrown away; by variable and replica.
    """

    variables: list[ReplicatedParam]
    copies: list[list[ReplicaParameter]]
    targets: list[list[nn.Parameter]]
    by_replica: list[list[Tensor]]
    wait: Callable[[], None]
    scale: float
    scattering: Scattering | None
    dropped: set[tuple[ReplicatedParam, int]] = field(default_factory=set)


class Buckets:
    """The buckets of a strategy's gradients, and those in flight.

    Args:
        deferred: gradients from under ``no_sync``; while there are any, nothing is launched.
        finite: checks gradients; a bucket with others is left to the end of the pass.
        scatter: gives replicas the gradients that they need; ``None`` if each needs all.

    Attributes:
        in_flight: the reductions launched and not collected: the list of ``GradTracker``.
        order: the recorded order.
        is_disordered: whether gradients have arrived in another order than that.
        is_held: whether nothing is launched until all that has arrived is reduced.
    """

    def __init__(
        self,
        replicas: Replicas,
        runner: Runner,
        reducer: Reducer,
        tracker: GradTracker,
        shares: Shares,
        deferred: DeferredGrads,
        finite: NonFiniteCheck | None,
        scatter: GradScatter | None = None,
    ) -> None:
        self._replicas, self._runner, self._reducer = replicas, runner, reducer
        self._scatter = scatter
        self._tracker = tracker
        self._shares, self._deferred, self._finite = shares, deferred, finite
        self._side = SideStream(replicas.mesh.devices)
        self._streams = tracker.streams
        self._plan: _Plan | None = None
        self.order: ReadyGrads | None = None
        self._hooks: list[Any] = []
        self.in_flight: list[_Reduction] = tracker.in_flight
        self.is_disordered = self.is_held = False

    # The order of arrival

    def record_order(self, arrivals: ReadyGrads, *, again: bool) -> None:
        """Records the order of a pass, for the buckets of the next passes.

        Args:
            again: whether the pass before had the same order.
        """
        plan = self._plan
        if self._streams is not None and self._streams.are_mixed:
            self.forget_order()
            return
        if not arrivals.is_regular or (plan is not None and arrivals is plan.order):
            return
        if any(not copy.requires_grad for mine in arrivals.copies for copy in mine):
            return  # a parameter was frozen since: the next pass will have another order
        for variable in arrivals.variables:
            refuse_sparse(variable.home, variable.name)  # which a flat buffer has no place for
        if plan is None or again:
            self.forget_order()
            ends = self.bucket_ends_of(arrivals.variables)[:-1]
            self._plan = plan = _Plan(arrivals, ends)
            self.order = arrivals
            for index, end in enumerate(ends):
                for copies in arrivals.copies:
                    launch = partial(self._handle_arrival, plan, index)
                    self._hooks.append(copies[end - 1].on_accumulate(launch))

    def bucket_ends_of(self, variables: Sequence[ReplicatedParam]) -> list[int]:
        """Returns the ends of the buckets; one bucket has variables of one mesh position.

        Its hook can then record the stream of all its gradients.
        """
        ends: list[int] = []
        for _, mine in groupby(variables, attrgetter("devices")):
            sizes = [variable.targets[0].nbytes for variable in mine]
            begin = ends[-1] if ends else 0
            ends += [begin + end for end in bucket_ends(sizes, self._reducer.bytes_per_pack)]
        return ends

    def forget_order(self) -> None:
        """Drops the recorded order."""
        for hook in self._hooks:
            hook.remove()
        self._plan, self.order, self._hooks, self.is_disordered = None, None, [], False

    # Launching during a pass

    @disable_dynamo
    def _handle_arrival(self, plan: _Plan, index: int, copy: ReplicaParameter) -> None:
        """Launches a bucket if it is complete and its turn has come."""
        self._tracker.mutex.call(self._launch_if_due, plan, index, copy)

    def _launch_if_due(self, plan: _Plan, index: int, copy: ReplicaParameter) -> None:
        if self._streams is not None:
            self._streams.record(copy.replica_id, copy.device)
        if index > len(self.in_flight):
            before = plan.order.copies[copy.replica_id][plan.ends[index - 1] - 1]
            self.is_disordered |= local_grad(before) is None
        if plan is self._plan and index == len(self.in_flight) and not self.is_held:
            if self._may_launch(copy.variable.devices):
                with nullcontext() if self._streams is None else self._streams.make_caller_wait():
                    self._launch(plan.order, plan.bounds(index))

    def _may_launch(self, devices: Sequence[torch.device]) -> bool:
        if self._deferred.is_open or self._deferred.has_passes:
            return False
        if self._streams is not None and not self._streams.are_complete(devices):
            return False  # a slot is filled, but its hook has not recorded the stream yet
        running = self._runner.running
        takes_turns = running is not None and running.lockstep.takes_turns
        return takes_turns or not self._tracker.may_be_in_second_pass()

    @torch.no_grad()
    def _launch(self, order: ReadyGrads, bounds: slice) -> None:
        shares = self._shares.of_all()
        variables = order.variables[bounds]
        if shares is None or any(variable.hooks for variable in variables) or order.is_complex:
            return
        copies = [mine[bounds] for mine in order.copies]
        if not self._tracker.are_in_order(copies):
            return
        by_replica = self._tracker.take_complete(copies, self._finite)
        if by_replica is None:
            return
        targets = [mine[bounds] for mine in order.targets]
        scattering = None
        if self._scatter is not None and not self._scatter.find_whole(variables, targets):
            scattering = self._scatter.begin(variables, by_replica, self._streams)
        scale = shares.common
        if scattering is None:
            moved = self._reducer.move(by_replica, self._streams)
            unshare(by_replica, moved.staying, self._streams)
            if scale is None:
                weigh(by_replica, shares)
        elif scale is None:
            scattering.weigh(shares)
        factor = 1.0 if scale is None else scale
        name = f"bucket {len(self.in_flight) + 1}: {len(variables)} parameters"

        def reduce() -> None:
            self._replicas.timeline.begin(OVERLAPPED, REDUCTION, name)
            with torch.no_grad():
                if scattering is None:
                    self._reducer.all_reduce(moved, factor)
                else:
                    scattering.reduce(self._replicas)
            self._replicas.timeline.end(OVERLAPPED, REDUCTION)

        wait = self._side.start(reduce)
        if scattering is not None:
            by_replica = []  # the gradients are in the buffers
        self.in_flight.append(
            _Reduction(variables, copies, targets, by_replica, wait, factor, scattering)
        )

    # Collecting when the pass has ended

    def collect(self) -> None:
        """Waits for the reductions in flight, and accumulates the gradients."""
        timeline = self._replicas.timeline
        for reduction in self._pop_reductions():
            timeline.begin(CROSS, EXPOSED)
            reduction.wait()
            timeline.end(CROSS, EXPOSED)
            self._runner.unfinished = True  # some replicas have it, some not: [Note: Interrupts]
            if reduction.scattering is not None and self._scatter is not None:
                reduction.scattering.finish(reduction.scale)
                for variable, r in reduction.dropped:
                    self._scatter.drop(variable, (r,))
            else:
                for r, targets in enumerate(reduction.targets):
                    is_kept = [(v, r) not in reduction.dropped for v in reduction.variables]
                    grads = compress(reduction.by_replica[r], is_kept)
                    accumulate([*compress(targets, is_kept)], [*grads])
            self._runner.unfinished = self._runner.running is not None

    def _pop_reductions(self) -> list[_Reduction]:
        reductions = [*self.in_flight]
        if reductions:
            self.in_flight.clear()
            self._tracker.settle()
        self.is_held = False
        return reductions

    # Dropping

    def drop(self, variable: ReplicatedParam, replica_ids: Iterable[int]) -> None:
        """Marks gradients in flight to be thrown away when they arrive, for these replicas."""
        self._tracker.mutex.call(self._drop, variable, replica_ids)

    def _drop(self, variable: ReplicatedParam, replica_ids: Iterable[int]) -> None:
        self.is_held = True
        for reduction in self.in_flight:
            if variable in reduction.variables:
                reduction.dropped.update((variable, r) for r in replica_ids)

    def discard(self) -> None:
        """Waits for the reductions in flight, and throws the gradients away."""
        for reduction in self._pop_reductions():
            with suppress(Exception):  # the run has failed already, with its own error
                reduction.wait()

    def forget(self, variable: ReplicatedParam) -> None:
        """Drops the order, and the gradients in flight of a variable that was freed.

        Takes no lock: a garbage collection may call it at any time.
        """
        self.forget_order()
        for reduction in tuple(self.in_flight):
            if variable in reduction.variables:
                reduction.dropped.update((variable, r) for r in range(len(reduction.targets)))
                reduction.copies = [
                    [copy for copy in mine if copy.variable is not variable]
                    for mine in reduction.copies
                ]

    def close(self) -> None:
        """Closes the side stream; idempotent."""
        self._side.close()


def bucket_ends(sizes_bytes: Sequence[int], bytes_per_pack: int) -> list[int]:
    """Cuts a sequence of gradients into buckets; returns the end index of each.

    A bucket holds at most ``bytes_per_pack``, the first at most 1 MiB, or one gradient.

        sizes 1 1 3 1 1 1, 3 bytes per pack  ->  2 3 6
    """
    one_kind = [torch.uint8] * len(sizes_bytes)  # a bucket may mix dtypes; packs do not
    return [pack[-1] + 1 for pack in plan_packs(sizes_bytes, one_kind, bytes_per_pack)]
