"""Runner: runs a function on every replica and calls the lifecycle hooks around it.

The hooks keep the replicas equal between runs: [Note: Parts] in ``execution/lifecycle.py``.
``EveryNSteps`` repeats a check during training. ``ExclusiveRun`` admits one thread at a time;
``LockstepStack`` has the replicas' threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch

from mirror.base.process_bound import reinit_after_fork
from mirror.base.timeline import BACKWARD, CROSS, INPUT, MANY_MARKS, last_used
from mirror.device.gpu_waits import GpuWaits
from mirror.device.host import release_thread_pool
from mirror.device.streams import CopyStreams, Stopwatch, has_failed
from mirror.devices import generators_of, separate_streams
from mirror.errors import StrategyError
from mirror.execution.lifecycle import (
    AllLifecycleHooks,
    GoesAlone,
    LifecycleHooks,
    do_nothing,
    step_ends,
)
from mirror.execution.parallel_runs import ParallelRuns
from mirror.execution.replica_thread import Replay, ThreadState, replay_calls, replica_tasks
from mirror.execution.replicas import Replicas, WeakReplicaMap
from mirror.execution.run import (
    Replica,
    Run,
    current,
    is_active_in,
    refuse_within_another,
    replica_of,
)
from mirror.execution.swapped_state import RngPool, call_with_worker_rng
from mirror.threads.lockstep import Lockstep
from mirror.threads.merge_point import Tasks
from mirror.threads.schedule import PARALLEL, Schedule
from mirror.threads.user_frames import add_note, calls

T = TypeVar("T")

_runners: WeakReplicaMap[Runner] = WeakReplicaMap()
runner_of = _runners.get


class Runner:
    """Runs functions on the replicas of one strategy, in their threads.

    Args:
        replicas: the replicas of the strategy.
        schedule: the order of turns, see [Note: Turns], or ``"auto"``: ``threads/schedule.py``.
        timeout_seconds: a run fails if no replica moves for so long; ``None``: no limit.

    Attributes:
        schedule: how the replicas move.
        running: the innermost run in progress, ``None`` between runs.
        parallel_pass: the backward pass outside ``run`` that uses the replicas' threads.
        num_prepared: how often the replicas were made equal before code that may change them.
        num_code_runs: how often replicas have run code, and not recorded calls.
        unfinished: whether the replicas may differ, because an operation on them is in progress.
            If none is, an interrupt has left the flag: [Note: Interrupts].
        locksteps: the replicas' threads, by depth of nested runs.
        is_usable: whether ``check_usable`` raises nothing.
        on_outermost_end: on one of several workers, called when an outermost run has succeeded.
        parallel_runs: decides which runs take turns, if replicas may overlap.
        replays_in_caller: whether recorded calls of the replicas are made in the caller's thread.
        copies: streams for arguments from the host to GPUs; ``None`` on simulated devices.
        generators: those of the replicas' GPUs, at each position.
        gpu_waits: samples how long GPUs wait for the host; ``None`` on simulated devices.
    """

    def __init__(
        self, replicas: Replicas, *, schedule: str, timeout_seconds: float | None
    ) -> None:
        self.replicas = replicas
        self.running: Run | None = None
        self.parallel_pass: GoesAlone | None = None
        self.num_prepared = self.num_code_runs = 0
        self.unfinished = False
        self._unended: tuple[Run, ThreadState | None] | None = None
        self.schedule = Schedule(schedule)
        # Simulated replicas that compute at once do so in a replay, too.
        self.replays_in_caller = self.schedule.keeps_order or not replicas.are_simulated
        if self.schedule.watches_passes:
            replicas.timeline.at_step_ends.append(self._end_step)
        self.locksteps = LockstepStack(replicas, self.schedule.of_turns, timeout_seconds)
        self._stopwatches: tuple[Stopwatch, ...] = ()  # once ``measure`` has been called
        self.on_outermost_end: Callable[[], None] = do_nothing
        self.set_hooks(())
        self._claim, positions = ExclusiveRun(), replicas.mesh.positions
        self.generators = [own for p in positions if (own := generators_of(p))]
        self._streams = RngPool(replicas.devices)
        self.parallel_runs: ParallelRuns | None = None
        # Replicas on GPUs also overlap while one of them stalls: they share the same state.
        if schedule == PARALLEL or (schedule == "staggered" and not replicas.are_simulated):
            self.parallel_runs = ParallelRuns(replicas, schedule)
        self.copies = None if replicas.are_simulated else CopyStreams(replicas.mesh.devices)
        self.gpu_waits: GpuWaits | None = None
        if not replicas.are_simulated:
            self.gpu_waits = GpuWaits(replicas.devices)
            replicas.timeline.at_step_ends.append(self._sample_gpus)
        self.is_closed = self._is_forked = False
        self.is_usable = True
        _runners.put(replicas, self)
        reinit_after_fork(self)

    def set_hooks(self, parts: Sequence[LifecycleHooks]) -> None:
        """Sets the hooks that are called at each event, in this order. See [Note: Parts]."""
        self._parts = AllLifecycleHooks(self.replicas.num_replicas, parts)

    def prepare(self, what: str = "a change of all replicas") -> None:
        """Copies changes of the cross-replica context to all replicas, on behalf of ``what``."""
        if self.running is not None or self.parallel_pass is not None:
            self.check_between_runs(what)
        if self.unfinished and self.running is None:
            self.recover()
        self.num_prepared += 1
        self._parts.prepare()

    def recover(self) -> None:
        """Restores all replicas to the first one's state after a failure."""
        unended = self._unended
        if unended is not None and self.running is None:
            self._fail(*unended)
            return
        self._parts.recover()
        if self.running is None:
            self.unfinished = False

    def call_cross_replica(self, run: Run, fn: Callable[[], Any]) -> Any:
        """Calls ``fn`` in a merge, as if the run ended before it and a new run began after it."""
        self._parts.finish(run, has_returned=False)
        self._parts.on_run_end(run)
        self._parts.sync_idle(run)
        self.on_outermost_end()
        run.swap_in_first()
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
        replay: Replay | None = None,
    ) -> Run:
        """Calls ``fn(replica_id)`` on every active replica; returns the run with its results.

        Args:
            weights: the replicas' shares in the gradient mean, by replica id; equal if ``None``.
            replay: returns recorded calls to be made in place of ``fn``. See ``replay_calls``.

        Raises:
            StrategyError: called from one of the replicas, by two threads at once, or after
                ``close``.
        """
        active = tuple(active)
        # Called by a replica, in a merge, or in a parallel pass, where it waits for the others.
        if self.parallel_pass is not None or (
            self.running is not None and is_active_in(self.replicas)
        ):
            run = self._run(fn, active, weights, replay)
        elif self.replicas.workers.is_multi_process:
            run = self._claim.call(self._run_of_worker, fn, active, weights, replay)
        else:
            run = self._claim.call(self._run, fn, active, weights, replay)
        if run.has_stepped:
            step_ends.notify(self.replicas.timeline)
        return run

    def call_exclusively(self, call: Callable[[], T], what: str) -> T:
        """Calls a function that works on all replicas, while no run is in progress or can start.

        Raises:
            StrategyError: called in a run, during another thread's run, or after ``close``.
        """
        self.check_usable()
        if is_active_in(self.replicas) and self.running is not None:
            raise StrategyError(
                f"{what} was called inside run; call it in the cross-replica context, in place of "
                "strategy.run"
            )
        if current.replica is not None:
            refuse_within_another(self.replicas, what)
        return self._claim.call(call)

    def _run_of_worker(
        self,
        fn: Callable[[int], Any],
        active: tuple[int, ...],
        weights: Sequence[float] | None,
        replay: Replay | None,
    ) -> Run:
        if not self.is_between_runs:
            return self._run(fn, active, weights, replay)
        workers, own = self.replicas.workers, partial(self._run, fn, active, weights, replay)
        run = workers.call_outermost(partial(call_with_worker_rng, workers, self.generators, own))
        workers.record_run(run.total_weight())
        self.on_outermost_end()
        return run

    def _run(
        self,
        fn: Callable[[int], Any],
        active: tuple[int, ...],
        weights: Sequence[float] | None,
        replay: Replay | None,
    ) -> Run:
        if not self.is_usable:
            self.check_usable()
        if current.replica is not None:
            self._refuse_within_run()
        outer = self.running
        self.prepare("run")
        # A parallel pass has the threads of the first depth.
        depth = (self.parallel_pass is not None) + (0 if outer is None else outer.depth + 1)
        lockstep = self.locksteps.get_lockstep(depth)
        for generators in self.generators:
            if generators[1:]:
                separate_streams(generators)
        keeps_order, by_schedule = self.schedule.keeps_order, True  # else they take turns
        if outer is not None:
            by_schedule = keeps_order or (len(outer.active) > 1 and outer.swapped is None)
        elif self.parallel_runs is not None and active[1:]:
            by_schedule = self.parallel_runs.begin()
        state = None  # a single simulated replica runs in the caller's thread, with its state
        if active[1:] or self.copies is not None or self.replicas.mesh.is_model_parallel:
            sharers = len(active) if by_schedule and lockstep.starts_at_once else 1
            may_overlap = len(active) > 1 and not keeps_order
            state = ThreadState.capture(self.replicas, sharers, may_overlap=may_overlap)
            lockstep.ends_teams = state.num_threads > 1 and release_thread_pool is not None
            # Activation checkpointing needs tensors to be saved in one order.
            by_schedule = by_schedule and state.saved_tensors_hooks is None
        takes_turns = active[1:] and (keeps_order or not by_schedule)
        run = Run(
            self.replicas,
            lockstep,
            active,
            weights,
            outer,
            swapped=self._streams.begin(active) if takes_turns else None,
            checks=self._parts.at_merging,
        )
        try:
            try:
                self.unfinished, self._unended, self.running = True, (run, state), run
                last_used.reference = self.replicas.timeline.reference
                recorded = None if replay is None else replay(run)
                if recorded is not None:
                    run.results = replay_calls(run, recorded)
                else:
                    self.num_code_runs += 1
                    tasks = replica_tasks(run, fn, state)
                    at_once = None if by_schedule else False
                    run.results = lockstep.run(tasks, at_once=at_once, act=run.act)
                self._parts.finish(run)
            finally:
                if outer is None:
                    self.running = None
                elif run.is_or_has_within(self.running):
                    self.running = outer
                else:
                    run.is_left = True
            self._end(run, state)
            self._parts.sync_idle(run)
            self.unfinished, self._unended = outer is not None, None
        except BaseException:
            try:
                self._fail(run, state)
            except BaseException:  # an interrupt during the handling of another error
                self._fail(run, state)
                raise
            raise
        return run

    def _refuse_within_run(self) -> None:
        """Raises StrategyError on one replica of a run, of this strategy or another one."""
        if replica_of(self.replicas) is not None:
            raise StrategyError(
                "run was called inside run, on one replica; start a run in the cross-replica "
                "context, which merge_call gives: get_replica_context().merge_call(fn)"
            )
        refuse_within_another(self.replicas, "run")

    def _end(self, run: Run, state: ThreadState | None, *, has_failed: bool = False) -> None:
        """Restores the caller's thread state and random stream after a run."""
        if state is not None and state.has_set_threads:
            state.restore()
        if run.swapped is not None:
            run.swapped.end()
        if self.parallel_runs is not None and run.outer is None:
            self.parallel_runs.end(has_failed=has_failed)
        if self.replicas.timeline.marks[MANY_MARKS:]:
            self.replicas.timeline.add_up()
        self._parts.on_run_end(run)

    def _fail(self, run: Run, state: ThreadState | None) -> None:
        """Ends a run that has failed; idempotent."""
        if run.is_left:
            return
        if self.running is run:
            self.running = run.outer
        self.replicas.timeline.drop_open()
        self._parts.recover()
        self._parts.on_run_failed(run)
        self._end(run, state, has_failed=True)
        self.unfinished, self._unended = run.outer is not None, None

    def _sample_gpus(self) -> None:
        assert self.gpu_waits is not None
        if self.is_closed or self._is_forked:
            return  # a step beside it: the last strategy's timeline counts it
        self.gpu_waits.end_step()
        sample = self._sample_at_span if self.gpu_waits.is_sampling else None
        timeline = self.replicas.timeline
        if sample is not None or timeline.sample is not None:
            timeline.set_sample(sample)

    def _sample_at_span(self, lane: int, ended: str | None) -> None:
        assert self.gpu_waits is not None
        self.gpu_waits.sample(None if lane < 0 else lane, counts=ended is not INPUT)
        if not self.gpu_waits.is_sampling:  # a capture has begun
            self.replicas.timeline.set_sample(None)

    def _end_step(self) -> None:
        _, sums = self.replicas.timeline.steps[-1]
        seconds = sums[CROSS][BACKWARD]
        if self.schedule.passes_at_once:  # then it is what the replicas' times exceed the pass by
            seconds += sum(lane[BACKWARD] for lane in sums[: self.replicas.num_replicas])
        self.schedule.end_step(seconds)

    def run_parallel_pass(self, this: GoesAlone, tasks: Tasks) -> None:
        """Runs the replicas' parts of a backward pass in their threads, all at once."""
        self.parallel_pass = this
        try:
            self.locksteps.get_lockstep(0).run(tasks, at_once=True)
        finally:
            self.parallel_pass = None

    @property
    def starts_at_once(self) -> bool:
        """Whether the replicas of the last run started at once, or backward passes may."""
        if self.schedule.keeps_order:
            return self.schedule.passes_at_once
        return bool(self.locksteps) and self.locksteps[0].is_eager

    @property
    def is_between_runs(self) -> bool:
        """Whether no run, and no backward pass in the replicas' threads, is in progress."""
        return self.running is None and self.parallel_pass is None

    @property
    def is_free(self) -> bool:
        """Whether the replicas' threads exist and are idle."""
        if not self.is_between_runs:
            return False
        # Not closed, nor interrupted.
        return bool(self.locksteps) and self.locksteps[0].usable and not self.locksteps[0].is_busy

    def lone_replica(self) -> Replica:
        """Returns the only replica, for code without any strategy."""
        run = Run(self.replicas, self.locksteps.get_lockstep(0), (0,), is_default=True)
        return run.members[0]

    # Measuring how long each replica computes, to split batches over devices of unequal speed.

    def measure(self) -> Callable[[], tuple[float, ...]]:
        """Starts measuring; returns a function for the seconds each replica has computed in runs.

        Waits at merge points and the caller's work between runs do not count.
        """
        if not self._stopwatches:
            self._stopwatches = tuple(map(Stopwatch, self.replicas.devices))
            self.replicas.timeline.set_stopwatches(self._stopwatches)
        return lambda: tuple(watch.seconds() for watch in self._stopwatches)

    # Checks, forks and closing

    def check_usable(self) -> None:
        """Raises StrategyError after ``close``."""
        if self._is_forked and not self.replicas.are_simulated:
            raise StrategyError(
                "this process was forked from the one that made the strategy, and GPUs cannot be "
                "used in both; make the strategy in the process that trains, or start that with "
                "multiprocessing.get_context('spawn')"
            )
        if self.is_closed:
            raise StrategyError(
                "this strategy is closed; create a new one (copy.deepcopy(model) gives an "
                "ordinary module to mirror there)"
            )

    @property
    def runs_elsewhere(self) -> bool:
        """Whether a run is in progress to which the calling thread does not belong."""
        return self.running is not None and not is_active_in(self.replicas)

    def check_between_runs(self, what: str) -> None:
        """Raises StrategyError while replicas run, except inside their merge."""
        at_once = self.parallel_pass
        if self.runs_elsewhere or (at_once is not None and not at_once.go_alone()):
            raise StrategyError(
                f"{what} was asked for by another thread while strategy.run, or backward, is "
                "going on; wait until it has returned"
            )

    def after_fork(self) -> None:
        """Drops the threads in a forked process: they exist only in the parent."""
        self._is_forked, self.is_usable = True, self.replicas.are_simulated and self.is_usable
        if self.running is not None or self.parallel_pass is not None:
            self.unfinished = True
        self.running, self.parallel_pass, self._claim = None, None, ExclusiveRun()
        self.locksteps.abandon_threads()

    def close(self) -> None:
        """Ends the replicas' threads; idempotent."""
        if self.running is not None or self.parallel_pass is not None:
            raise StrategyError("close() was called inside run; close the strategy after it")
        self.is_closed, self.is_usable = True, False
        self.replicas.timeline.set_sample(None)
        self.locksteps.close()


class EveryNSteps:
    """Calls ``act`` after every ``num_steps`` steps of a strategy, between runs.

    A step ends with an optimizer step outside ``run``, or with the ``run`` in which an optimizer
    stepped. See [Note: Ends of steps].

    Attributes:
        num_steps_done: the number of steps since this object was created.
    """

    def __init__(self, num_steps: int, runner: Runner, act: Callable[[], None]) -> None:
        self.num_steps_done = self._last = 0
        self._every, self._num_remaining = num_steps, num_steps
        self._runner, self._act = runner, act
        runner.replicas.timeline.at_step_ends.append(self._step_ends)

    def _step_ends(self) -> None:
        self.num_steps_done += 1
        self._num_remaining -= 1
        # In a merge, or in a parallel backward pass, the replicas are not done.
        is_due = self._num_remaining <= 0 and not self._runner.is_closed
        if is_due and self._runner.is_between_runs:
            before, self._last = self._last, self.num_steps_done
            self._num_remaining = self._every
            try:
                self._act()
            except Exception as error:
                then = f"after step {before}" if before else "never"
                add_note(error, f"found after step {self._last}; looked at before: {then}")
                raise


class ExclusiveRun:
    """Admits one thread at a time to run the replicas of a strategy."""

    def __init__(self) -> None:
        self._claims: dict[str, int] = {}

    def call(self, run: Callable[..., T], *args: Any) -> T:
        """Calls ``run(*args)`` unless another thread's call is in progress.

        Raises:
            StrategyError: another thread's call is in progress.
        """
        thread = threading.get_ident()
        claims = self._claims
        try:
            # setdefault is atomic. An interrupt may have left this thread's own claim behind.
            claimed = claims.setdefault("run", thread)
            if claimed != thread:
                if self in calls(claimed, ExclusiveRun.call):
                    raise StrategyError(
                        "run was called while another thread's run of the same strategy is going "
                        "on; call it when that has returned, or give each thread a strategy of "
                        "its own"
                    )
                claims["run"] = thread  # that thread's claim is also a leftover
            return run(*args)
        finally:
            if claims.get("run") == thread:
                claims.clear()


class LockstepStack(list[Lockstep]):
    """The locksteps by depth of nested runs, created when first needed.

    Args:
        schedule: the schedule of the replicas, see [Note: Turns].
        timeout_seconds: a run fails if no replica moves for so long; ``None``: no limit.
    """

    def __init__(self, replicas: Replicas, schedule: str, timeout_seconds: float | None) -> None:
        self._names, self._abort = replicas.names, replicas.communicator.abort
        # Simulated devices stand for distinct ones.
        self._devices = replicas.names if replicas.are_simulated else replicas.devices
        self._on_error = partial(_abort_if_one_failed, replicas.mesh.devices, self._abort)
        self.schedule, self._timeout_seconds = schedule, timeout_seconds

    def get_lockstep(self, depth: int) -> Lockstep:
        """Returns the lockstep for a nesting depth; replaces one that an interrupt has hit."""
        while len(self) <= depth:
            self.append(self._make())
        lockstep = self[depth]
        if lockstep.is_busy or not lockstep.usable:
            lockstep.dismiss()
            lockstep = self[depth] = self._make()
        return lockstep

    def close(self) -> None:
        """Ends and joins the threads."""
        for lockstep in self:
            lockstep.close()
        self.clear()

    def abandon_threads(self) -> None:
        """Drops the locksteps in a forked process: the threads exist only in the parent."""
        for lockstep in self:
            lockstep.abandon_threads()
        self.clear()

    def _make(self) -> Lockstep:
        limit = self._timeout_seconds
        lockstep = Lockstep(self._names, schedule=self.schedule, timeout_seconds=limit)
        lockstep.abort, lockstep.on_error = self._abort, self._on_error
        lockstep.devices = self._devices
        return lockstep


def _abort_if_one_failed(devices: Sequence[torch.device], abort: Callable[[], object]) -> None:
    """Aborts collectives if a GPU has failed: its peers' kernels would wait until their timeout.

    So would the replicas that wait for these peers, and the run, which waits for the replicas.
    """
    if any(map(has_failed, devices)):
        abort()


def close_threads(locksteps: Sequence[Lockstep]) -> None:
    """Makes the threads of a deleted strategy end at their next wait."""
    for lockstep in locksteps:
        lockstep.dismiss()
