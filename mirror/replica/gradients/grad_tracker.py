"""Watch: which copies have a local gradient that is not reduced yet, and how that is noted.

[Note: Silent copies]
A post-accumulate hook, which is ``list.append`` itself, notes each copy that gets a gradient.
Every hook takes the GIL, in the middle of a backward pass that otherwise does without it, while
another replica's Python wants it. So once a pass has brought the same gradients in the same order
as the one before, those copies lose their hooks. What a pass leaves in their slots is found when
it ends, at a look while it goes on, or at the next look after a pass outside ``run``: every pass
begins and ends in ``passes.py``. ``pending`` lacks it until then. Buckets that fill in another
order than the one learnt bring the hooks back, to learn it.

The slot tells whether there is a gradient; ``pending`` only where to look, and in which order they
came. A copy that stands there without one (its gradient was set, or is in a bucket) does no harm.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

from mirror.base.at_fork import reinit_after_fork
from mirror.device.current_streams import ReplicaStreams
from mirror.execution.replicas import Replicas
from mirror.replica.gradients.ready_grads import ReadyGrads, local_grad
from mirror.replica.params.replicated_param import ReplicaParameter, ReplicatedParam
from mirror.values import are_identical


class BackwardPass:
    """A backward pass.

    Attributes:
        is_over: whether it has ended; an interrupt may keep that from being told.
    """

    __slots__ = ("is_over",)

    def __init__(self) -> None:
        self.is_over = False


class GradTracker:
    """Sees local gradients arrive.

    Attributes:
        replicas: whose gradients they are.
        pending: per replica, the copies with a local gradient, in the order of arrival, less those
            in buckets on their way.
        unsettled: per replica, the backward passes that go on and the buckets that have some of
            its gradients on their way: while there are any, ``pending`` does not tell all.
        may_have_arrived: whether a pass outside ``run`` has to be looked after.
        changes: how often a copy has come, or has come or ceased to require a gradient.
        streams: of GPUs, those on which passes have brought what is not reduced.
        lock: held while ``pending`` loses or changes entries that others may want, too.
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
        self._silent_order: ReadyGrads | None = None  # in which the last ones came that lost hooks
        self._num_passes = [0] * replicas.num_replicas  # inside run, since the last reduction
        self.after_fork()
        reinit_after_fork(self)

    def after_fork(self) -> None:
        """Makes the lock, which in a forked process nobody has."""
        self.lock = threading.Lock()

    def add(self, copy: ReplicaParameter) -> None:
        """Has the arrival of every local gradient of ``copy`` noted, once it requires any."""
        if copy.arrival_hook is None and copy.requires_grad:
            copy.arrival_hook = copy.watch(self.pending[copy.replica_id].append)

    # Passes

    def begin_pass(self, this: BackwardPass, replica_id: int | None, *, within: bool) -> None:
        """Notes that a backward pass begins.

        Args:
            replica_id: whose pass it is; ``None`` for one outside ``run``.
            within: whether another pass of the same thread goes on.
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
        """Notes that a backward pass has ended, and what it has brought."""
        if replica_id is None:
            self.may_have_arrived = True  # should an interrupt come between
            self._remove(this, (*self.unsettled, *self._passes))
            self.may_have_arrived = True  # looked for when the strategy is used next
            if self.streams is not None:
                self.scan()
                self._note_streams(range(len(self.pending)))
            return
        self._remove(this, (self.unsettled[replica_id], self._passes[replica_id]))
        self.find(replica_id)
        self._note_streams((replica_id,))

    def _remove(self, this: BackwardPass, lists: Iterable[Any]) -> None:
        for passes in lists:
            try:
                passes.remove(this)
            except ValueError:  # another thread has found that it is over
                continue

    def drop_interrupted(self) -> None:
        """Strikes off the passes that are over, of which an interrupt has kept from telling."""
        for passes, unsettled in zip(self._passes, self.unsettled, strict=True):
            for this in tuple(passes):
                if this.is_over:
                    self._remove(this, (unsettled, passes))

    def may_be_in_second_pass(self) -> bool:
        """Whether a replica that others have not caught up with may be writing to its slots."""
        return max(self._num_passes) > 1

    # What has arrived

    def scan(self) -> None:
        """Finds what passes outside ``run``, or passes that go on, have brought."""
        if self.may_have_arrived or any(self._passes):
            self.drop_interrupted()
            self.find()
            self.may_have_arrived = False

    def scan_replica(self, replica_id: int) -> None:
        """Finds what a replica's pass that goes on has brought."""
        if self._passes[replica_id]:
            self.drop_interrupted()
            self.find(replica_id)

    def find(self, replica_id: int | None = None) -> None:
        """Notes what has come to copies without hooks, of one replica or of all."""
        for r in range(len(self.pending)) if replica_id is None else (replica_id,):
            pending, silent = self.pending[r], self._silent[r]
            if silent:
                with self.lock:
                    found = [copy for copy in silent if local_grad(copy) is not None]
                    if found or pending:
                        others = [copy for copy in pending if not copy.is_silent]
                        pending[:] = [*found, *others]

    def are_in_order(self, order: Sequence[Sequence[ReplicaParameter]]) -> bool:
        """Whether these have arrived first on every replica; the slots tell of silent ones."""
        return all(
            copies[-1].is_silent or are_identical(pending[: len(copies)], copies)
            for pending, copies in zip(self.pending, order, strict=True)
        )

    def remove(self, taken: Sequence[Sequence[ReplicaParameter]]) -> None:
        """Strikes each replica's copies off once, whose gradients were taken; wants the lock.

        What came again meanwhile, from another pass, stays.
        """
        for pending, copies in zip(self.pending, taken, strict=True):
            if are_identical(pending[: len(copies)], copies):
                del pending[: len(copies)]
                continue
            first = {id(copy): i for i, copy in reversed(list(enumerate(pending)))}
            places = (first[id(copy)] for copy in copies if id(copy) in first)
            for i in sorted(places, reverse=True):  # others may append meanwhile
                del pending[i]

    def clear(self) -> None:
        """Strikes all off: it was taken."""
        for copies in self.pending:
            copies.clear()
        self._num_passes = [0] * len(self.pending)

    def _note_streams(self, replica_ids: Iterable[int]) -> None:
        """Notes the streams that are current, of replicas to which a pass has brought gradients.

        Their memory is used there, and may be by what follows the pass.
        """
        if self.streams is not None:
            for r in replica_ids:
                if self.pending[r]:
                    self.streams.record(r)

    def forget_streams(self) -> None:
        """Drops what was noted of streams: what came on them has been seen to."""
        if self.streams is not None:
            self.streams.forget()

    def forget(self, variable: ReplicatedParam) -> None:
        """Strikes off a variable that is gone. A garbage collection may come here: no lock."""
        self._silent_order = None
        self._silent = [_without(variable, silent) for silent in self._silent]
        for copies in self.pending:
            for i in reversed(range(len(copies))):  # others may append meanwhile
                if copies[i].variable is variable:
                    del copies[i]

    # Hooks

    def drop_hooks(self, arrivals: ReadyGrads) -> None:
        """Does without the hooks of copies whose gradients come in a known order."""
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
        """Gives all copies their hooks back, to learn another order."""
        silent, self._silent = self._silent, [[] for _ in self._silent]
        self._silent_order = None
        for copy in chain(*silent):
            copy.is_silent, copy.arrival_hook = False, None
            self.add(copy)  # one that is frozen now has it back when it is not any more


def _without(
    variable: ReplicatedParam, copies: Iterable[ReplicaParameter]
) -> list[ReplicaParameter]:
    return [copy for copy in copies if copy.variable is not variable]
