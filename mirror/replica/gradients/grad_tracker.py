"""GradTracker: which copies have a local gradient that is not reduced yet.

[Note: Silent copies]
A post-accumulate hook, ``list.append`` itself, records each copy that gets a gradient. Every hook
takes the GIL in the middle of a backward pass, which otherwise runs without it, while another
replica's Python needs it. So when a pass has brought the same gradients in the same order as the
pass before, those copies lose their hooks and become silent. Their slots are searched when a pass
ends, when a replica reads gradients during a pass, and when the strategy is next used after a pass
outside ``run``; ``pending`` is incomplete until then. ``backward_interceptor.py`` reports the
begin and end of every pass. If buckets fill in another order than the recorded one, the copies get
their hooks back, to record the new order.

The slot says whether there is a gradient; ``pending`` only says where to search, and the order of
arrival. An entry without a gradient (the gradient was set, or is in a bucket) does no harm.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

from mirror.base.at_fork import reinit_after_fork
from mirror.device.streams import ReplicaStreams
from mirror.execution.replicas import Replicas
from mirror.replica.gradients.ready_grads import ReadyGrads, local_grad
from mirror.replica.params.replicated_param import ReplicaParameter, ReplicatedParam
from mirror.values import are_identical


class BackwardPass:
    """A backward pass.

    Attributes:
        is_over: whether it has ended; after an interrupt, ``end_pass`` may not have been called.
    """

    is_over = False


class GradTracker:
    """Tracks the local gradients of one strategy's replicas.

    Attributes:
        replicas: the replicas.
        pending: per replica, the copies with a local gradient, in the order of arrival; without
            those in buckets in flight.
        unsettled: per replica, the running backward passes, and the buckets in flight with its
            gradients: while there are any, ``pending`` is incomplete.
        may_have_arrived: whether a pass outside ``run`` may have brought gradients.
        changes: how often a copy was added, or its ``requires_grad`` has changed.
        streams: on GPUs, the streams on which passes have brought unreduced gradients.
        lock: held while entries of ``pending`` are removed or changed.
    """

    def __init__(self, replicas: Replicas) -> None:
        self.replicas = replicas
        self.pending: tuple[list[ReplicaParameter], ...] = tuple([] for _ in replicas.devices)
        self.unsettled: tuple[list[object], ...] = tuple([] for _ in self.pending)
        self._passes: tuple[list[BackwardPass], ...] = tuple([] for _ in self.pending)
        self.may_have_arrived = False
        self.changes = 0
        self.streams = None if replicas.are_simulated else ReplicaStreams(replicas.places.replicas)
        self._silent: list[list[ReplicaParameter]] = [[] for _ in self.pending]
        self._silent_order: ReadyGrads | None = None  # of the copies that last lost their hooks
        self._num_passes = [0] * replicas.num_replicas  # inside run, since the last reduction
        self.after_fork()
        reinit_after_fork(self)

    def after_fork(self) -> None:
        """Creates a free lock: a thread that does not exist in the fork may have held the old."""
        self.lock = threading.Lock()

    def add(self, copy: ReplicaParameter) -> None:
        """Tracks the local gradients of ``copy``, if it requires any."""
        if copy.arrival_hook is None and copy.requires_grad:
            copy.arrival_hook = copy.on_accumulate(self.pending[copy.replica_id].append)

    # Passes

    def begin_pass(self, this: BackwardPass, replica_id: int | None, *, within: bool) -> None:
        """Records that a backward pass begins.

        Args:
            replica_id: the replica that runs it; ``None`` outside ``run``.
            within: whether it runs inside another pass of the same thread.
        """
        if replica_id is None:
            for unsettled, passes in zip(self.unsettled, self._passes, strict=True):
                unsettled.append(this)
                passes.append(this)
            return
        self.unsettled[replica_id].append(this)
        self._passes[replica_id].append(this)
        if not within:
            with self.lock:
                self._num_passes[replica_id] += 1

    def end_pass(self, this: BackwardPass, replica_id: int | None) -> None:
        """Records that a backward pass has ended, and the gradients that it has brought."""
        if replica_id is None:
            self.may_have_arrived = True  # before, in case an interrupt comes between
            self._remove(this, (*self.unsettled, *self._passes))
            self.may_have_arrived = True  # the next use of the strategy searches the slots
            if self.streams is not None:
                self.scan()
                self._record_streams(range(len(self.pending)))
            return
        self._remove(this, (self.unsettled[replica_id], self._passes[replica_id]))
        self.find(replica_id)
        self._record_streams((replica_id,))

    def _remove(self, this: BackwardPass, lists: Iterable[Any]) -> None:
        for passes in lists:
            try:
                passes.remove(this)
            except ValueError:  # another thread has removed it
                continue

    def drop_interrupted(self) -> None:
        """Removes passes that are over, but whose ``end_pass`` an interrupt has prevented."""
        for passes, unsettled in zip(self._passes, self.unsettled, strict=True):
            for this in tuple(passes):
                if this.is_over:
                    self._remove(this, (unsettled, passes))

    def may_be_in_second_pass(self) -> bool:
        """Whether a replica may be adding to its slots in a second pass before the reduction."""
        return max(self._num_passes) > 1

    # Gradients that have arrived

    def scan(self) -> None:
        """Finds the gradients of passes outside ``run``, and of running passes."""
        if self.may_have_arrived or any(self._passes):
            self.drop_interrupted()
            self.find()
            self.may_have_arrived = False

    def scan_replica(self, replica_id: int) -> None:
        """Finds the gradients that a replica's running passes have brought."""
        if self._passes[replica_id]:
            self.drop_interrupted()
            self.find(replica_id)

    def find(self, replica_id: int | None = None) -> None:
        """Adds silent copies that have a gradient to ``pending``, of one replica or of all."""
        for r in range(len(self.pending)) if replica_id is None else (replica_id,):
            pending, silent = self.pending[r], self._silent[r]
            if silent:
                with self.lock:
                    found = [copy for copy in silent if local_grad(copy) is not None]
                    if found or pending:
                        with_hooks = [copy for copy in pending if not copy.is_silent]
                        pending[:] = [*found, *with_hooks]

    def are_in_order(self, order: Sequence[Sequence[ReplicaParameter]]) -> bool:
        """Whether these copies have arrived first on every replica, in this order.

        True for silent copies, whose order is not recorded.
        """
        return all(
            copies[-1].is_silent or are_identical(pending[: len(copies)], copies)
            for pending, copies in zip(self.pending, order, strict=True)
        )

    def remove(self, taken: Sequence[Sequence[ReplicaParameter]]) -> None:
        """Removes one entry per copy whose gradient was taken. The caller holds the lock.

        A second entry, from another pass that has begun since, stays.
        """
        for pending, copies in zip(self.pending, taken, strict=True):
            if are_identical(pending[: len(copies)], copies):
                del pending[: len(copies)]
                continue
            first = {id(copy): i for i, copy in reversed(list(enumerate(pending)))}
            indices = (first[id(copy)] for copy in copies if id(copy) in first)
            for i in sorted(indices, reverse=True):  # hooks may append at the same time
                del pending[i]

    def clear(self) -> None:
        """Removes all entries: their gradients were taken."""
        for copies in self.pending:
            copies.clear()
        self._num_passes = [0] * len(self.pending)

    def _record_streams(self, replica_ids: Iterable[int]) -> None:
        """Records the current streams of replicas to which a pass has brought gradients.

        Work on these streams uses the gradients' memory now, and may use it after the pass.
        """
        if self.streams is not None:
            for r in replica_ids:
                if self.pending[r]:
                    self.streams.record(r)

    def forget_streams(self) -> None:
        """Drops the recorded streams, after the gradients on them were reduced."""
        if self.streams is not None:
            self.streams.forget()

    def forget(self, variable: ReplicatedParam) -> None:
        """Removes a variable that was freed. Takes no lock: a garbage collection may call it."""
        self._silent_order = None
        self._silent = [_without(variable, silent) for silent in self._silent]
        for copies in self.pending:
            for i in reversed(range(len(copies))):  # hooks may append at the same time
                if copies[i].variable is variable:
                    del copies[i]

    # Hooks

    def drop_hooks(self, arrivals: ReadyGrads) -> None:
        """Removes the hooks of copies that arrive in a known order. See [Note: Silent copies]."""
        if arrivals is self._silent_order:
            return
        self._silent_order = arrivals
        for r, copies in enumerate(arrivals.copies):
            for copy in copies:
                assert copy.arrival_hook is not None
                copy.arrival_hook.remove()
                copy.is_silent = True
            older = [copy for copy in self._silent[r] if copy.variable not in arrivals.variables]
            self._silent[r] = [*copies, *older]

    def restore_hooks(self) -> None:
        """Gives all copies their hooks back, to record another order."""
        silent, self._silent = self._silent, [[] for _ in self._silent]
        self._silent_order = None
        for copy in chain(*silent):
            copy.is_silent, copy.arrival_hook = False, None
            self.add(copy)  # a frozen copy gets its hook when it is unfrozen


def _without(
    variable: ReplicatedParam, copies: Iterable[ReplicaParameter]
) -> list[ReplicaParameter]:
    return [copy for copy in copies if copy.variable is not variable]
