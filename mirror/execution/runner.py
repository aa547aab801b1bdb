"""Runner: runs a function on every replica, and keeps what must be equal between runs so.

What that is: [Note: Parts] in ``part.py``.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from contextvars import copy_context
from typing import Any

from mirror.accelerator.stopwatch import Stopwatch
from mirror.accelerator.streams import CopyStreams
from mirror.concurrency.lockstep import Lockstep, Tasks
from mirror.devices import (
    backward_in_calling_thread,
    generators_of,
    separate_streams,
    using,
)
from mirror.errors import StrategyError
from mirror.execution.current import current, enter, is_inside, leave, replica_of
from mirror.execution.nesting import refuse_within_another
from mirror.execution.part import GoesAlone, Part
from mirror.execution.parts import Parts
from mirror.execution.random_streams import RandomStreams, Streams
from mirror.execution.replicas import Replica, Replicas
from mirror.execution.run import Run
from mirror.execution.step_ends import step_ends
from mirror.execution.thread_state import ThreadState
from mirror.timeline import FORWARD

# Weakly on both sides: a runner holds its replicas.
_runners: weakref.WeakKeyDictionary[Replicas, weakref.ref[Runner]] = weakref.WeakKeyDictionary()


class Runner:
    """Runs functions on the replicas of one strategy, in their threads.

    Args:
        replicas: who they are.
        schedule: how they take turns, see [Note: Turns].
        timeout_seconds: how long no replica may move before a run fails; ``None``: for ever.

    Attributes:
        running: the innermost run going on, ``None`` between runs.
        parallel_pass: the backward pass outside ``run`` that has the replicas' threads.
        locksteps: the replicas' threads, by depth of runs inside runs.
        stopwatches: one per replica once somebody measures.
        copies: by what arguments travel from the host to GPUs; ``None`` on simulated devices.
    """

    def __init__(
        self, replicas: Replicas, *, schedule: str, timeout_seconds: float | None
    ) -> None:
        self.replicas = replicas
        self.running: Run | None = None
        self.parallel_pass: GoesAlone | None = None
        self.locksteps: list[Lockstep] = []
        self.stopwatches: tuple[Stopwatch, ...] = ()
        self._schedule = schedule
        self._timeout_seconds = timeout_seconds
        self.keep(())
        self._claims: dict[str, int] = {}
        self._generators = generators_of(replicas.devices)
        self._streams = Streams(schedule == "lockstep" and not self._generators)
        self.copies = None if replicas.are_simulated else CopyStreams(replicas.devices)
        self.is_closed = False
        _runners[replicas] = weakref.ref(self)

    def keep(self, parts: Sequence[Part]) -> None:
        """Has these parts told what happens, in this order. See [Note: Parts]."""
        self._parts = Parts(self.replicas.num_replicas, parts)
        self.prepare, self.recover = self._parts.prepare, self._parts.recover

    def call_outside(self, run: Run, fn: Callable[[], Any]) -> Any:
        """Calls ``fn`` in a merge: as if the run had ended here, and a new one began after."""
        self._parts.finish(run)
        self._parts.ran(run)
        self._parts.bring_along(run)
        if run.streams is not None:
            run.streams.enter_first()
        try:
            return fn()
        finally:
            self.prepare()

    # Runs

    def run(
        self,
        fn: Callable[[int], Any],
        active: Sequence[int],
        *,
        weights: Sequence[float] | None = None,
    ) -> Run:
        """Calls ``fn(replica_id)`` on every active replica; returns the run with its results.

        Args:
            weights: the replicas' shares in the gradient mean, by replica id; equal if ``None``.

        Raises:
            StrategyError: called from one of the replicas, by two threads at once, or after
                ``close``.
        """
        belongs = self.running is not None and is_inside(self.replicas)
        if belongs or self.parallel_pass is not None:
            # Of a replica, in a merge, or in a parallel pass, where it waits for the others.
            return self._run(fn, tuple(active), weights)
        thread = threading.get_ident()
        # One step, whoever comes at the same moment. A claim of its own an interrupt has left.
        if self._claims.setdefault("run", thread) != thread:
            raise StrategyError(
                "run was called while another thread's run of the same strategy is going on; call "
                "it when that has returned, or give each thread a strategy of its own"
            )
        try:
            run = self._run(fn, tuple(active), weights)
        finally:
            self._claims.clear()
        if step_ends.listeners:
            step_ends.run_ended(run)
        return run

    def _run(
        self, fn: Callable[[int], Any], active: tuple[int, ...], weights: Sequence[float] | None
    ) -> Run:
        self.check_usable()
        if replica_of(self.replicas) is not None:
            raise StrategyError(
                "run was called inside run, on one replica; start a run in the cross-replica "
                "context, which merge_call gives: get_replica_context().merge_call(fn)"
            )
        if current.replica is not None:
            refuse_within_another(self.replicas, "run")
        self.check_between_runs("run")
        outer = self.running
        self.prepare()
        # A parallel pass has the threads of the first depth.
        depth = (self.parallel_pass is not None) + (0 if outer is None else outer.depth + 1)
        lockstep = self._lockstep(depth)
        run = Run(
            self.replicas,
            lockstep,
            active,
            weights,
            outer,
            stopwatches=self.stopwatches,
            streams=self._begin_streams(active),
            checks=self._parts.at_merging,
        )
        if len(self._generators) > 1:
            separate_streams(self._generators)
        sharers = len(active) if self._schedule == "concurrent" else 1
        state = ThreadState.capture(self.replicas, sharers)
        tasks = {r: self._task(fn, run, r, state) for r in active}
        timeline = self.replicas.timeline
        self.running, timeline.is_in_run = run, True
        timeline.use()
        try:
            # Activation checkpointing wants what is saved in one order.
            in_order = state.saved_tensors_hooks is not None
            at_once = False if in_order else None
            run.results = lockstep.run(tasks, at_once=at_once, act=run.act)
            for returned in self._parts.at_returned:
                returned()
            self._parts.finish(run)
        except BaseException:
            if self._goes_on(run):
                self.running = outer
                timeline.drop_open()
                self.recover()
            raise
        finally:
            if self._goes_on(run):
                self.running, timeline.is_in_run = outer, outer is not None
            state.restore()
            if run.streams is not None:
                run.streams.end()
            self._parts.ran(run)
        self._parts.bring_along(run)
        if outer is None:
            timeline.note_run()
        return run

    def run_parallel_pass(self, this: GoesAlone, tasks: Tasks) -> None:
        """Runs the replicas' parts of a backward pass in their threads, all at once."""
        self.parallel_pass = this
        try:
            self.locksteps[0].run(tasks, at_once=True)
        finally:
            self.parallel_pass = None

    @property
    def starts_at_once(self) -> bool:
        """Whether the replicas of the last run have started all at once."""
        return bool(self.locksteps) and self.locksteps[0].is_eager

    @property
    def is_between_runs(self) -> bool:
        """Whether no run, and no backward pass in the replicas' threads, is going on."""
        return self.running is None and self.parallel_pass is None

    @property
    def is_free(self) -> bool:
        """Whether the replicas' threads are there, and nothing is going on in them."""
        if not self.is_between_runs:
            return False
        return bool(self.locksteps) and self.locksteps[0].usable  # not closed, nor interrupted

    def lone_replica(self) -> Replica:
        """Returns the only replica, for code without any strategy."""
        run = Run(self.replicas, self._lockstep(depth=0), (0,), is_default=True)
        return run.members[0]

    def _begin_streams(self, active: tuple[int, ...]) -> RandomStreams | None:
        if len(active) > 1 and self._streams.are_apart:
            return self._streams.begin(active[0])
        return None

    def _goes_on(self, run: Run) -> bool:
        """Whether a run has not been left to itself, by an interrupt of the one around it."""
        running = self.running
        while running is not None and running is not run:
            running = running.outer
        return running is not None

    def _task(
        self, fn: Callable[[int], Any], run: Run, replica_id: int, state: ThreadState
    ) -> Callable[[], Any]:
        replica = run.members[replica_id]
        device = replica.device
        strategy, timeline = self.replicas.strategy, self.replicas.timeline
        variables = copy_context()

        def call() -> Any:
            enter(strategy, replica)
            timeline.use()  # by this thread, which may have the cross-replica context in a merge
            timeline.begin(replica_id, FORWARD)
            try:
                return self._call(fn, run, replica_id)
            finally:
                timeline.end(replica_id, FORWARD)
                leave()
                if replica.lent:
                    replica.give_back()

        def task() -> Any:
            if len(run.active) == 1:
                with using(device):
                    return call()
            if self.replicas.are_simulated:  # on the CPU there is nothing to enter
                return state.call(lambda: variables.run(call), device)
            with using(device), backward_in_calling_thread((device,)):
                return state.call(lambda: variables.run(call), device)

        return task

    def _call(self, fn: Callable[[int], Any], run: Run, replica_id: int) -> Any:
        """Calls a replica's function, which draws from its own random stream."""
        if run.streams is not None and run.streams.inside != replica_id:
            run.streams.enter(replica_id)
        result = self._measured(fn, replica_id) if self.stopwatches else fn(replica_id)
        if run.stepped:
            for stepped, left in run.stepped.items():
                left[replica_id] = stepped.options()
        return result

    # Measuring how long each replica computes, for splitting batches over unlike devices.

    def measure(self) -> Callable[[], tuple[float, ...]]:
        """Begins to measure; returns what gives the seconds each replica has computed in runs.

        Waiting for the other replicas at merge points does not count, nor does what the caller
        does between runs. Without a call of this, runs measure nothing.
        """
        if not self.stopwatches:
            self.stopwatches = tuple(map(Stopwatch, self.replicas.devices))
        return lambda: tuple(watch.seconds() for watch in self.stopwatches)

    def _measured(self, fn: Callable[[int], Any], replica_id: int) -> Any:
        watch = self.stopwatches[replica_id]
        watch.start()
        try:
            return fn(replica_id)
        finally:
            watch.stop()

    # Who may do what, and for how long

    def check_usable(self) -> None:
        """Raises StrategyError after ``close``."""
        if self.is_closed:
            raise StrategyError(
                "this strategy is closed; create a new one (copy.deepcopy(model) gives an "
                "ordinary module to mirror there)"
            )

    def check_between_runs(self, what: str) -> None:
        """Raises StrategyError while replicas run, but for what runs in their merge."""
        is_ours = self.running is None or is_inside(self.replicas)
        if not is_ours or (self.parallel_pass is not None and not self.parallel_pass.go_alone()):
            raise StrategyError(
                f"{what} was asked for by another thread while strategy.run, or backward, is "
                "going on; wait until it has returned"
            )

    def close(self) -> None:
        """Ends the replicas' threads; idempotent."""
        if self.running is not None or self.parallel_pass is not None:
            raise StrategyError("close() was called inside run; close the strategy after it")
        self.is_closed = True
        for lockstep in self.locksteps:
            lockstep.close()
        self.locksteps.clear()

    def _lockstep(self, depth: int) -> Lockstep:
        while len(self.locksteps) <= depth or not self.locksteps[depth].usable:
            self.locksteps[depth : depth + 1] = [self._new_lockstep()]
        return self.locksteps[depth]

    def _new_lockstep(self) -> Lockstep:
        made = Lockstep(
            self.replicas.names, schedule=self._schedule, timeout_seconds=self._timeout_seconds
        )
        made.break_off = self.replicas.communicator.abort
        return made


def runner_of(replicas: Replicas) -> Runner:
    """Returns the runner of replicas that are in use."""
    runner = _runners[replicas]()
    assert runner is not None
    return runner


def end_threads(locksteps: Sequence[Lockstep]) -> None:
    """Has the threads end, of a strategy that is gone, when they next wait."""
    for lockstep in locksteps:
        lockstep.dismiss()
