"""Backward passes: their begin and end; GradTracker records the gradients that they bring.

A post-accumulate hook, ``list.append`` itself, records each copy that gets a gradient; on GPUs
another hook records the stream that has made it. Every hook takes the GIL in the middle of a
backward pass, which otherwise runs without it, while another replica's Python needs it. So when a
pass has brought the same gradients in the same order as the pass before, those copies lose their
hooks and become silent. Their slots are searched when a pass ends, when a replica reads gradients
during a pass, and when the strategy is next used after a pass outside ``run``; ``pending`` is
incomplete until then. If buckets fill in another order than the recorded one, the copies get their
hooks back, to record the new order.

The slot says whether there is a gradient; ``pending`` only says where to search, and the order of
arrival. An entry without a gradient (the gradient was set, or is in a bucket) does no harm.

[Note: Slots of replicas at once]
A slot is the C++ ``.grad`` of a copy, or the ``.grad`` of a target. While replicas run at once,
only the replica itself reads and writes its slots. The engine writes slots without the GIL. And
torch releases the GIL while it frees a gradient that has a Python object: another thread that
reads the slot then gets a half-freed tensor, and Python crashes. There is one exception: the
launch of a bucket reads slots of all replicas, which the engine has filled and will not touch
again. It holds ``mutex``, and so does a replica that empties its slots.
A pass of another thread, over another strategy's model for example, reads them under ``mutex``,
and only while no pass of this strategy runs; else they are searched when the strategy is next
used. So a pass begins under ``mutex``, and gradients are freed under it.

Torch has hooks for gradients, but none for the start of a backward pass. So the function through
which ``backward`` and ``torch.autograd.grad`` start the engine is wrapped, once, when the first
strategy is created. The wrapper costs one microsecond per pass. It also splits passes outside
``run``: see [Note: Graph boundaries].
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Container, Iterable, Sequence
from functools import partial
from itertools import chain, compress, repeat
from operator import is_not
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from mirror.base.dynamo import disable_dynamo
from mirror.base.mutex import Mutex
from mirror.base.process_bound import reinit_after_fork
from mirror.base.timeline import BACKWARD, CROSS, MANY_MARKS, latest_timeline
from mirror.base.torch_private import PASS, current_graph_task_id, transforms_of, wrap_once
from mirror.device.streams import ReplicaStreams
from mirror.execution.lifecycle import do_nothing
from mirror.execution.replica_thread import serial_graphs
from mirror.execution.replicas import Replicas
from mirror.execution.run import Run, Unverifiable, current, renaming
from mirror.execution.runner import runner_of
from mirror.replica.collectives.autograd_nodes import order
from mirror.replica.gradients.non_finite import NonFiniteCheck
from mirror.replica.gradients.packed_grads import PackedPasses, node_hooks
from mirror.replica.gradients.parallel_backward import backward_at_once
from mirror.replica.gradients.pass_arguments import (
    clone_gradients,
    expand_inputs,
    refuse_hooks,
    refuse_transformed,
)
from mirror.replica.gradients.ready_grads import (
    ReadyGrads,
    ReplicaGrads,
    are_usual,
    local_grad,
    set_local_grad,
)
from mirror.replica.gradients.unmirrored import CallSite, leaves_of_pass
from mirror.replica.params.replicated_param import ReplicaParameter, ReplicatedParam
from mirror.replica.params.replicated_params import param_of
from mirror.replica.params.workers_without_examples import start_without_examples
from mirror.threads.user_frames import add_note, find_remedy
from mirror.values import are_identical


class BackwardPass:
    """A backward pass.

    Attributes:
        thread: the identifier of the thread that has begun it.
        is_over: whether it has ended; after an interrupt, ``end_pass`` may not have been called.
    """

    # Class attributes and no __init__: every pass makes one, and this is faster.
    thread, is_over = 0, False


class GradTracker:
    """Tracks the local gradients of one strategy's replicas.

    Attributes:
        replicas: the replicas.
        pending: per replica, the copies with a local gradient, in the order of arrival; without
            those in buckets in flight.
        unsettled: per replica, the running backward passes, and the buckets in flight with its
            gradients: while there are any, ``pending`` is incomplete.
        unsearched: the last pass outside ``run``, until the slots are searched for its gradients.
        packed: the gradients of passes that leave them in no slots.
        sources: the lists of these four; while all are empty, no gradient has arrived.
        changes: how often a copy was added, or its ``requires_grad`` has changed.
        in_flight: buckets that were launched in a pass and not collected. Each has ``copies``, per
            replica, whose gradients it has taken.
        arrivals: the copies that the last pass has brought gradients to, in the order of arrival.
        streams: on GPUs, the streams on which passes have brought unreduced gradients.
        mutex: held while entries of ``pending`` are removed or changed, while a pass begins, and
            while gradients are freed.
        check_pass: called with the run, the call site and the engine's arguments, before a pass.
        checked: the call sites for which it is not called.
    """

    def __init__(self, replicas: Replicas) -> None:
        self.replicas = replicas
        self.pending: tuple[list[ReplicaParameter], ...] = tuple([] for _ in replicas.devices)
        self.unsettled: tuple[list[object], ...] = tuple([] for _ in self.pending)
        self.unsearched: list[BackwardPass] = []
        self.streams = None if replicas.are_simulated else ReplicaStreams(replicas.mesh.replicas)
        self.packed = PackedPasses(self.pending, self.streams)
        passes: tuple[list[Any], ...] = (self.unsearched, self.packed.unreduced)
        self.sources: tuple[list[Any], ...] = (*self.pending, *self.unsettled, *passes)
        self.in_flight: list[Any] = []
        self._passes: tuple[list[BackwardPass], ...] = tuple([] for _ in self.pending)
        self.changes = 0
        self._silent: list[list[ReplicaParameter]] = [[] for _ in self.pending]
        self.arrivals: ReadyGrads | None = None
        self._silent_order: ReadyGrads | None = None  # of the copies that last lost their hooks
        self._num_passes = [0] * replicas.num_replicas  # inside run, since the last reduction
        self._is_second_pass = False  # one outside run, before the reduction of an earlier pass
        self.check_pass: Callable[[Run, CallSite, Sequence[Any]], object] = do_nothing
        self.checked: Container[CallSite] = ()
        self.after_fork()
        reinit_after_fork(self)
        self._may_be_silent = replicas.mirrors and register_listener(self)

    def after_fork(self) -> None:
        """Creates a free lock: the old one may be held by a thread of the other process."""
        self.mutex = Mutex()

    def add(self, copy: ReplicaParameter) -> None:
        """Tracks the local gradients of ``copy``, if it requires any."""
        if not copy.arrival_hooks and copy.requires_grad:
            note = copy.on_accumulate(self.pending[copy.replica_id].append)
            copy.arrival_hooks = (note,)
            if self.streams is not None:
                record = copy.on_accumulate(partial(_record_use, self.streams))
                copy.arrival_hooks = (note, record)

    # Passes

    def begin_pass(self, this: BackwardPass, replica_id: int | None, *, within: bool) -> None:
        """Records that a backward pass begins.

        Args:
            replica_id: the replica that runs it; ``None`` outside ``run``.
            within: whether it runs inside another pass of the same thread.
        """
        if replica_id is None:
            self.mutex.call(self._begin_outer_pass, this, within)
            return
        for packed in self.packed.lent:
            packed.own(replica_id)
        lock = self.mutex.lock
        try:
            lock.acquire()
            self.unsettled[replica_id].append(this)
            self._passes[replica_id].append(this)
        finally:
            try:  # noqa: SIM105
                lock.release()
            except RuntimeError:  # see Mutex
                pass
        if not within:
            self._num_passes[replica_id] += 1

    def _begin_outer_pass(self, this: BackwardPass, within: bool) -> None:
        if self.packed.may_be:
            self.packed.make_room()
        if self.unsearched and not self._is_passed_elsewhere():
            self.scan()
        if not within:
            self._is_second_pass = any(self._passes) or any(self.pending)
        for unsettled, passes in zip(self.unsettled, self._passes, strict=True):
            unsettled.append(this)
            passes.append(this)

    def end_pass(self, this: BackwardPass, replica_id: int | None) -> None:
        """Records that a backward pass has ended, and the gradients that it has brought."""
        if replica_id is None:
            self.mutex.call(self._end_outer_pass, this)
            return
        self._remove(this, (self.unsettled[replica_id], self._passes[replica_id]))
        self.find(replica_id)
        if self.streams is not None:
            self._record_streams((replica_id,))

    def pack(self, this: BackwardPass, outputs: Sequence[Any]) -> tuple[GradientEdge, ...]:
        """Has a pass that has begun leave its gradients packed, if it can.

        Returns:
            Where it ends, so that it does not go through the slots; nothing: at all leaves.
        """
        is_alone = all(len(passes) == 1 for passes in self._passes)
        if is_alone and not (any(self.pending) or self.in_flight or self.unsearched):
            return self.packed.begin(this, outputs)
        return ()

    def _end_outer_pass(self, this: BackwardPass) -> None:
        if self.packed.may_be and self.packed.end(this):
            self._remove(this, (*self.unsettled, *self._passes))
            if self.streams is not None:
                for r in range(len(self.pending)):
                    self.streams.record(r)
            return
        self.unsearched[:] = (this,)  # before, in case an interrupt comes between
        self._remove(this, (*self.unsettled, *self._passes))
        self.unsearched[:] = (this,)  # the next use of the strategy searches the slots
        if self.streams is None:
            return
        if self._is_passed_elsewhere():
            for r in range(len(self.pending)):  # it may have brought gradients to any
                self.streams.record(r)
        else:
            self.scan()
            self._record_streams(range(len(self.pending)))

    def _is_passed_elsewhere(self) -> bool:
        """Whether a pass of another thread runs, which may be writing slots."""
        mine = threading.get_ident()
        return any(p.thread != mine and not p.is_over for p in set(chain(*self._passes)))

    def _remove(self, this: BackwardPass, lists: Iterable[Any]) -> None:
        for passes in lists:
            try:
                passes.remove(this)
            except ValueError:  # another thread has removed it
                continue

    def drop_interrupted(self) -> None:
        """Removes passes that are over, if an interrupt has prevented their ``end_pass``."""
        for passes, unsettled in zip(self._passes, self.unsettled, strict=True):
            for this in tuple(passes):
                if this.is_over:
                    self._remove(this, (unsettled, passes))

    def may_be_in_second_pass(self) -> bool:
        """Whether a replica may be adding to its slots in a second pass before the reduction."""
        return self._is_second_pass or max(self._num_passes) > 1

    # Gradients that have arrived

    def has_arrived(self, replica_id: int) -> bool:
        """Whether a replica has unreduced gradients from backward passes."""
        if self.unsettled[replica_id]:
            self.scan_replica(replica_id)
        return bool(self.pending[replica_id] or self.in_flight or self.packed.unreduced)

    def have_arrived(self) -> bool:
        """Whether any replica has unreduced gradients from backward passes."""
        if not any(self.sources):
            return False
        if self.unsearched or any(self._passes):
            self.scan()
        return any(self.pending) or bool(self.in_flight or self.packed.unreduced)

    def scan(self) -> None:
        """Finds the gradients of passes outside ``run``, and of running passes."""
        self.drop_interrupted()
        self.find()
        self.unsearched.clear()

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
                lock = self.mutex.lock
                try:
                    lock.acquire()
                    have_grads = map(is_not, map(local_grad, silent), repeat(None))
                    found = list(compress(silent, have_grads))
                    if pending:
                        found += [copy for copy in pending if not copy.is_silent]
                    if found or pending:
                        pending[:] = found
                finally:
                    try:  # noqa: SIM105
                        lock.release()
                    except RuntimeError:  # see Mutex
                        pass

    def drop_local(self, variable: ReplicatedParam, replica_ids: Iterable[int]) -> None:
        """Empties the slots of a variable's copies, for these replicas."""
        if self.packed.unreduced:
            self.packed.unpack()
        self.mutex.call(_empty_slots, [variable.copies[r] for r in replica_ids])

    def record_arrival_order(self) -> tuple[ReadyGrads, bool]:
        """Returns the copies with gradients, and whether the pass before had the same order.

        First are those in flight. Copies that arrive in the same order again lose their hooks.
        """
        arrived: Sequence[Sequence[ReplicaParameter]] = self.pending
        if self.in_flight:
            parts = [*[bucket.copies for bucket in self.in_flight], self.pending]
            arrived = [[*chain(*of_replica)] for of_replica in zip(*parts, strict=True)]
        if self.arrivals is not None and self.arrivals.are_ready(arrived):
            if self.arrivals is not self._silent_order:
                self._drop_hooks(self.arrivals)
            return self.arrivals, True
        self.arrivals = ReadyGrads(arrived)
        return self.arrivals, False

    def are_in_order(self, order: Sequence[Sequence[ReplicaParameter]]) -> bool:
        """Whether these copies have arrived first on every replica, in this order.

        True for silent copies: their order is not recorded.
        """
        return all(
            copies[-1].is_silent or are_identical(pending[: len(copies)], copies)
            for pending, copies in zip(self.pending, order, strict=True)
        )

    def take_complete(
        self, copies: Sequence[Sequence[ReplicaParameter]], finite: NonFiniteCheck | None
    ) -> list[ReplicaGrads] | None:
        """Takes the gradients of a bucket, which is launched; ``None`` if it is not complete.

        It is complete if all gradients are there, dense and finite. The caller holds the lock.
        """
        by_replica = [list(map(local_grad, mine)) for mine in copies]
        if not all(map(are_usual, by_replica)):
            return None
        if finite is not None and not finite.all_finite(by_replica):
            return None
        self._remove_pending(copies)
        if not self.in_flight:
            for unsettled in self.unsettled:
                unsettled.append(self.in_flight)
        deque(map(set_local_grad, chain(*copies), repeat(None)), maxlen=0)
        return by_replica

    def settle(self) -> None:
        """Records that the buckets in flight have been waited for."""
        for unsettled in filter(None, self.unsettled):
            unsettled[:] = [entry for entry in unsettled if entry is not self.in_flight]

    def _remove_pending(self, taken: Sequence[Sequence[ReplicaParameter]]) -> None:
        """Removes one entry of each taken gradient's copy.

        A second entry, from another pass that has begun since, stays.
        """
        for pending, copies in zip(self.pending, taken, strict=True):
            if not pending or are_identical(pending[: len(copies)], copies):
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
        self._is_second_pass = False

    def discard(self) -> bool:
        """Drops the gradients in all slots; returns whether there were any.

        No pass runs, so all entries of ``unsettled`` are stale.
        """
        self.drop_interrupted()
        self.find()
        were_there = any(self.pending) or bool(self.packed.unreduced)
        self.packed.discard()
        for copies, unsettled in zip(self.pending, self.unsettled, strict=True):
            self.mutex.call(_empty_slots, copies)
            unsettled.clear()
        self.clear()
        self.forget_streams()
        return were_there

    def _record_streams(self, replica_ids: Iterable[int]) -> None:
        """Records the current streams of replicas to which a pass has brought gradients.

        Work on these streams uses the gradients' memory now, and may use it after the pass.
        """
        assert self.streams is not None
        for r in replica_ids:
            if self.pending[r]:
                self.streams.record(r)

    def forget_streams(self) -> None:
        """Drops the recorded streams, after the gradients on them were reduced."""
        if self.streams is not None:
            self.streams.forget()

    def forget(self, variable: ReplicatedParam) -> None:
        """Removes a variable that was freed. Takes no lock: a garbage collection may call it."""
        if any(variable in packed.variables for packed in self.packed.unreduced):
            self.packed.unpack()
        self._silent_order = self.arrivals = None
        self._silent = [
            [c for c in silent if c.variable is not variable] for silent in self._silent
        ]
        for copies in self.pending:
            for i in reversed(range(len(copies))):  # hooks may append at the same time
                if copies[i].variable is variable:
                    del copies[i]

    # Hooks

    def _drop_hooks(self, arrivals: ReadyGrads) -> None:
        """Removes the hooks of copies that arrive in a known order."""
        if not (self._may_be_silent and arrivals.is_regular):
            return
        self._silent_order = arrivals
        for r, copies in enumerate(arrivals.copies):
            for copy in copies:
                for hook in copy.arrival_hooks:
                    hook.remove()
                copy.is_silent = True
            older = [copy for copy in self._silent[r] if copy.variable not in arrivals.variables]
            self._silent[r] = [*copies, *older]

    def restore_hooks(self) -> None:
        """Gives all copies their hooks back, to record another order."""
        silent, self._silent = self._silent, [[] for _ in self._silent]
        self._silent_order = None
        for copy in chain(*silent):
            copy.is_silent, copy.arrival_hooks = False, ()
            self.add(copy)  # a frozen copy gets its hook when it is unfrozen


@disable_dynamo
def _record_use(streams: ReplicaStreams, copy: ReplicaParameter) -> None:
    """Records the stream that has made a gradient: a forward pass may use streams of its own."""
    streams.record_use(copy.replica_id, copy.device)


def _empty_slots(copies: Iterable[ReplicaParameter]) -> None:
    for copy in copies:
        set_local_grad(copy, None)


_lock = Mutex()
_trackers: tuple[weakref.ref[GradTracker], ...] = ()  # those that are called for every pass


def watch_backward() -> None:
    """Wraps the start of backward passes; does nothing where torch lacks the function."""
    if hasattr(torch.autograd, PASS):
        wrap_once(torch.autograd, PASS, _wrap_backward)
        node_hooks.watch()


def register_listener(tracker: GradTracker) -> bool:
    """Registers a tracker for the begin and end of every backward pass.

    Returns:
        Whether this torch can report them.
    """
    _lock.call(_add_listener, tracker)
    return hasattr(torch.autograd, PASS)


def _add_listener(tracker: GradTracker) -> None:
    global _trackers
    alive = (reference for reference in _trackers if reference() is not None)
    _trackers = (*alive, weakref.ref(tracker))


def _wrap_backward(run: Callable[..., Any]) -> Callable[..., Any]:
    @disable_dynamo
    def run_backward(*args: Any, **kwargs: Any) -> Any:
        replica = current.replica
        if replica is not None and replica.tracing is not None:
            return run(*args, **kwargs)
        accumulates = kwargs.get("accumulate_grad", True)
        if args[4]:
            args = expand_inputs(*args)
        if accumulates and not getattr(args[0][0], "requires_grad", True):
            args = start_without_examples(*args)
        if replica is None:
            timeline, lane = latest_timeline(), CROSS
        else:
            timeline, lane = replica.replicas.timeline, replica.replica_id
        if timeline is not None:
            if timeline.marks[MANY_MARKS:]:
                timeline.add_up()
            timeline.mark((timeline.clock(), lane, BACKWARD, ""))
        if replica is not None:
            if replica.run.is_trial and accumulates:
                raise Unverifiable("forward calls backward, which would add to gradients twice")
            if len(args[1]) > 1 or (args[1][0] is not None and args[1][0].dim()):
                args = clone_gradients(*args)
            if not accumulates:
                refuse_hooks(args[4])
        elif accumulates:
            _refuse_during_runs(args)
        elif transforms_of(args[0][0]):
            refuse_transformed(args[0], args[4])
        this, begun = BackwardPass(), list[tuple[GradTracker, int | None]]()
        this.thread = threading.get_ident()
        try:
            within = current_graph_task_id() != -1
            for reference in _trackers if accumulates else ():
                tracker = reference()
                if tracker is not None:
                    replica_id = None
                    if replica is not None and tracker.replicas is replica.replicas:
                        replica_id = lane
                        caller = sys._getframe(3)  # of Tensor.backward
                        place = caller.f_code, caller.f_lasti, lane
                        if place not in tracker.checked:
                            tracker.check_pass(replica.run, place, args)
                    if replica is None or replica_id is not None:
                        tracker.begin_pass(this, replica_id, within=within)
                    begun.append((tracker, replica_id))
                    if tracker.packed.may_be and replica is None:
                        if not (within or args[3] or args[4]):  # a graph of it, or inputs
                            args = *args[:4], tracker.pack(this, args[0])
            if replica is None and serial_graphs.alive:
                with torch.autograd.set_multithreading_enabled(False):
                    order.advance()  # create_graph=True makes nodes
                    try:
                        return (
                            None if backward_at_once(run, args, kwargs) else run(*args, **kwargs)
                        )
                    except BaseException:
                        order.drop_arrivals(current_graph_task_id())
                        raise
            if replica is None:
                return None if backward_at_once(run, args, kwargs) else run(*args, **kwargs)
            lockstep = replica.run.lockstep  # the engine runs without the GIL
            is_away = not lockstep.takes_turns and lockstep.let_next_begin(lane)
            if replica.replicas.mesh.is_model_parallel:
                with renaming(replica):  # torch removes this mode for the time of backward
                    result = run(*args, **kwargs)
            else:
                result = run(*args, **kwargs)
            if is_away:
                replica.run.wait_for_turn(lane)
            return result
        except RuntimeError as error:
            if timeline is not None and (remedy := find_remedy(error)):
                add_note(error, remedy)
            raise
        finally:
            this.is_over = True
            for tracker, replica_id in begun:
                tracker.end_pass(this, replica_id)
            if timeline is not None:
                timeline.mark((timeline.clock(), lane, BACKWARD, None))

    return run_backward


def _refuse_during_runs(args: Any) -> None:
    """Raises StrategyError for a pass in the cross-replica context while another thread runs.

    Its gradients would be taken for those of the run's own passes, and weighted like them.
    """
    for reference in _trackers:
        tracker = reference()
        if tracker is None or not runner_of(tracker.replicas).runs_elsewhere:
            continue
        for leaf in leaves_of_pass(args):
            variable = param_of(leaf)
            if variable is not None and variable.replicas is tracker.replicas:
                runner_of(tracker.replicas).check_between_runs("a backward pass")
