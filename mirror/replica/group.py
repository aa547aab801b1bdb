"""The replica group: the devices, variables and threads that one strategy drives."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from contextvars import copy_context
from typing import Any

import torch
from torch import Tensor, nn

import mirror.replica.overrides  # noqa: F401  registers what tensor functions do
from mirror.comm.base import Communicator
from mirror.devices import (
    Stopwatch,
    backward_in_calling_thread,
    generators_of,
    is_simulated,
    separate_streams,
    using,
)
from mirror.errors import StrategyError
from mirror.execution.current import current, enter, leave
from mirror.execution.lockstep import Lockstep
from mirror.execution.random_streams import Streams
from mirror.execution.saved_draws import watch_saved_draws
from mirror.execution.thread_state import ThreadState
from mirror.host_memory import give_back_freed_memory, keep_freed_memory
from mirror.replica.buffers import Buffer
from mirror.replica.claim import by_one_thread
from mirror.replica.gradients import Gradients
from mirror.replica.module import ReplicaDict, mirror_module, route_call
from mirror.replica.nesting import refuse_within_another
from mirror.replica.optimizer import OptimizerMirror
from mirror.replica.optimizer_hooks import watch_optimizer_steps
from mirror.replica.parallel_pass import ParallelPass
from mirror.replica.passes import watch_passes
from mirror.replica.plain import PlainVariables, note_use
from mirror.replica.recompute import NoMerges
from mirror.replica.recorded import Recorded, is_unmade
from mirror.replica.run import ReplicaContext, Run
from mirror.replica.variables import Variable
from mirror.timeline import FORWARD, Timeline

_groups: weakref.WeakSet[ReplicaGroup] = weakref.WeakSet()


def all_groups() -> tuple[ReplicaGroup, ...]:
    """Returns the groups of all strategies alive."""
    return tuple(_groups)


class ReplicaGroup:
    """N replicas: index r lives on ``devices[r]``; an index is never inferred from a device.

    Attributes:
        variables, buffers: the records of what is mirrored, by ``id``; entries go with the tensor.
        handed_out_grads: gradients that the cross-replica context has seen, so may have changed.
        running: the innermost run going on, ``None`` between runs.
        parallel_pass: the backward pass outside ``run`` that the replicas' threads are in.
        last_active: the replicas that ran the last step.
    """

    def __init__(
        self,
        devices: Sequence[torch.device],
        communicator: Communicator,
        *,
        strategy: object,
        schedule: str,
        weighted: bool,
        bytes_per_pack: int,
        wire_dtype: torch.dtype | None,
        timeout_seconds: float | None,
    ) -> None:
        self.devices = tuple(devices)
        self.num_replicas = len(self.devices)
        self.communicator = communicator
        self.weighted = weighted
        self.names = tuple(
            f"replica {r} of {self.num_replicas} ({device})"
            for r, device in enumerate(self.devices)
        )
        self.variables: dict[int, Variable] = {}
        self.buffers: dict[int, Buffer] = {}
        self.handed_out_grads: dict[Variable, Tensor] = {}
        self.gradients = Gradients(self)
        self.optimizers: weakref.WeakSet[OptimizerMirror] = weakref.WeakSet()
        self.running: Run | None = None
        self.parallel_pass: ParallelPass | None = None
        self.last_active: tuple[int, ...] = tuple(range(self.num_replicas))
        self.stopwatches: tuple[Stopwatch, ...] = ()  # see mirror/replica/measure.py
        self.lazy_lock, self.timeline = threading.Lock(), Timeline(self.names)
        self.is_one_device = len(set(self.devices)) == 1
        # A single simulated device needs neither moving of arguments nor splitting.
        self.routes_calls = self.num_replicas > 1 or not is_simulated(self.devices)
        self.strategy = strategy  # strong: a model outlives the variable that held it
        self.bytes_per_pack = bytes_per_pack
        self._wire_dtype = wire_dtype
        self._schedule, self._timeout_seconds = schedule, timeout_seconds
        self.claims = dict[str, int]()  # see mirror/replica/claim.py
        self.locksteps, self.lent = list[Lockstep](), set[OptimizerMirror]()  # lent to a step
        self.recorded = Recorded()
        self.swaps: list[ReplicaDict] = []  # where a parameter was replaced inside run
        self._owned: dict[int, weakref.ref[Tensor]] = {}
        self.device_types = tuple({"cpu", *(device.type for device in self.devices)})
        self._generators = generators_of(self.devices)
        self.streams = Streams(schedule == "lockstep" and not self._generators)
        self.plain, self.is_closed = PlainVariables(), False
        self.is_nested = current.replica is not None  # made by a replica of another strategy
        _groups.add(self)
        watch_passes(watch_optimizer_steps if self.num_replicas > 1 else lambda: None)
        if schedule == "concurrent":
            watch_saved_draws()
        self._simulates = self.num_replicas > 1 and is_simulated(self.devices)
        if self._simulates:
            keep_freed_memory()

    # What is mirrored

    def own(self, tensor: Tensor, record: Variable | Buffer) -> None:
        """Registers a mirrored tensor for as long as it lives."""
        self._own_plain(tensor)
        if isinstance(record, Variable):
            self.variables[id(tensor)] = record
        else:
            self.buffers[id(tensor)] = record

    def owns(self, tensor: Tensor) -> bool:
        """Whether the tensor is mirrored by this group."""
        owned = self._owned.get(id(tensor))
        return owned is not None and owned() is tensor

    def record(self, module: nn.Module) -> None:
        """Notes a module to be mirrored at the next use."""
        if self.recorded.add(module):
            route_call(module, self)

    def mirror_recorded(self) -> None:
        """Mirrors the modules created in the scope, or changed, since the last use."""
        if self.recorded.modules or self.recorded.unmade:
            for module in self.recorded.take():
                self.mirror(module)

    def mirror(self, module: nn.Module) -> None:
        """Mirrors a module in place; with one replica only moves it to the device."""
        self.timeline.use()  # one replica may never have a run
        if self.num_replicas > 1:
            # What is made here outlives the caller's inference mode.
            with torch.inference_mode(False):
                mirror_module(module, self)
            return
        for submodule in module.modules():
            route_call(submodule, self)
            self.recorded.look_again(submodule)
        for tensor in (*module.parameters(), *module.buffers()):
            if not (self.owns(tensor) or is_unmade(tensor)):
                if tensor.device != self.devices[0]:
                    tensor.data = tensor.data.to(self.devices[0])
                self._own_plain(tensor)

    def _own_plain(self, tensor: Tensor) -> None:
        key, group, self.plain.has_mirrored = id(tensor), weakref.ref(self), True

        def disown(reference: object) -> None:
            alive = group()
            if alive is not None and alive._owned.get(key) is reference:
                del alive._owned[key]
                alive.buffers.pop(key, None)
                variable = alive.variables.pop(key, None)
                if variable is not None:
                    alive.handed_out_grads.pop(variable, None)
                    alive.gradients.forget(variable)

        self._owned[key] = weakref.ref(tensor, disown)

    # Coherence

    def prepare(self) -> None:
        """Makes all replicas equal to what the cross-replica context left."""
        if torch.is_inference_mode_enabled():
            # What is made here, of state too, outlives the caller's inference mode.
            with torch.inference_mode(False), torch.no_grad():
                self.prepare()
            return
        self.mirror_recorded()
        if self.num_replicas > 1:
            if self.running is None and self.lent:
                self.recover()  # a step in the cross-replica context has raised
            self.gradients.finish(self.gradients.equal_shares)
            self.carry()

    def carry(self) -> None:
        """Carries what changed in the cross-replica context to the other replicas."""
        for variable in self.variables.values():
            if variable.changed():
                variable.carry()
        for variable, grad in list(self.handed_out_grads.items()):
            if variable.targets[0].grad is grad:
                variable.carry_grad()
            else:
                del self.handed_out_grads[variable]
        for buffer in self.buffers.values():
            buffer.prepare()

    def settle(self) -> None:
        """Takes the variables as equal on all replicas, as after a step on each."""
        for variable in self.variables.values():
            variable.version = variable.copies[0]._version

    def note_run(self, active: tuple[int, ...]) -> None:
        """Notes that replicas have run, so that their buffers may have changed."""
        self.last_active = active
        for buffer in self.buffers.values():
            buffer.note_run()

    def recover(self) -> None:
        """Brings all replicas back to the first one's state after a run that failed."""
        self.gradients.discard()
        while self.swaps:
            self.swaps.pop().swapped.clear()
        for optimizer in list(self.optimizers):
            optimizer.give_back()
            optimizer.states.follow_first()
        for variable in self.variables.values():
            variable.follow_first()

    def bring_along(self, active: tuple[int, ...]) -> None:
        """Gives the replicas that sat out a run what the others have now."""
        idle = [r for r in range(self.num_replicas) if r not in active]
        if idle:
            with torch.inference_mode(False), torch.no_grad():
                for variable in self.variables.values():
                    variable.bring_along(active[0], idle)
                for optimizer in self.optimizers:
                    optimizer.states.take_over(active[0], idle)
                for buffer in self.buffers.values():
                    buffer.bring_along(idle)

    def all_reduce_lists(self, lists: Sequence[Sequence[Tensor]], scale: float) -> None:
        """Sums lists of tensors over the replicas, in place, through the communicator."""
        self.communicator.all_reduce_checked(
            lists, "sum", scale, self.bytes_per_pack, self._wire_dtype
        )

    def parameters(self) -> list[nn.Parameter]:
        """Returns the parameters it owns, mirrored or the only replica's."""
        tensors = (reference() for reference in self._owned.values())
        return [tensor for tensor in tensors if isinstance(tensor, nn.Parameter)]

    # Running

    @by_one_thread
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
            StrategyError: called from a replica of this group, or after ``close``.
        """
        self.check_usable()
        replica = current.replica
        if replica is not None and replica.group is self:
            raise StrategyError(
                "run was called inside run, on one replica; start a run in the cross-replica "
                "context, which merge_call gives: get_replica_context().merge_call(fn)"
            )
        if replica is not None:
            refuse_within_another(self, "run")
        self.check_between_runs("run")
        note_use(self)
        outer = self.running
        self.prepare()
        is_within = self.parallel_pass is not None  # which has the threads of the first depth
        lockstep = self._lockstep(is_within + (0 if outer is None else outer.depth + 1))
        run = Run(self, lockstep, tuple(active), weights, outer)
        if len(self._generators) > 1:
            separate_streams(self._generators)
        sharers = len(run.active) if self._schedule == "concurrent" else 1
        state = ThreadState.capture(self.device_types, sharers)
        tasks = {r: self._task(fn, context, state) for r, context in run.contexts.items()}
        self.running = run
        self.timeline.use()
        try:
            # Activation checkpointing wants what is saved in one order.
            in_order = state.saved_tensors_hooks is not None
            run.results = lockstep.run(tasks, at_once=False if in_order else None)
            while self.swaps:
                self.swaps.pop().refuse_swaps()
            run.finish()
        except BaseException:
            if run.goes_on():
                self.running = outer
                self.timeline.drop_open()
                self.recover()
            raise
        finally:
            self.running = outer if run.goes_on() else self.running
            state.restore()
            if run.streams is not None:
                run.streams.end()
            self.note_run(run.active)
        if self.num_replicas > 1:
            self.bring_along(run.active)
            self.settle()
        if outer is None:
            self.timeline.note_run()
        return run

    def recomputing(self, replica_id: int) -> ReplicaContext:
        """Returns a context for what is recomputed of one replica's part in a backward pass."""
        return Run(self, NoMerges(), (replica_id,), None, None).contexts[replica_id]

    def lone_context(self) -> ReplicaContext:
        """Returns a context of the only replica, for code without any strategy."""
        run = Run(self, self._lockstep(depth=0), (0,), None, None)
        run.is_default = True
        return run.contexts[0]

    def inside_merge(self) -> bool:
        """Whether this thread belongs to a replica that is merging: merge_call may run."""
        frames = (frame for frame, _ in current.stack if frame is not None)
        return any(frame.group is self for frame in frames)

    def _task(
        self, fn: Callable[[int], Any], context: ReplicaContext, state: ThreadState
    ) -> Callable[[], Any]:
        device, replica_id = context.device, context.replica_id
        variables, timeline = copy_context(), self.timeline

        def call() -> Any:
            enter(context.strategy, context)
            timeline.use()  # by this thread, which may have the cross-replica context in a merge
            timeline.begin(replica_id, FORWARD)
            try:
                return context.call(fn)
            finally:
                timeline.end(replica_id, FORWARD)
                leave()
                if context.lent:
                    context.release()

        def task() -> Any:
            if len(context.run.active) == 1:
                with using(device):
                    return call()
            if self._simulates:  # on the CPU there is nothing to enter
                return state.call(lambda: variables.run(call), device)
            with using(device), backward_in_calling_thread((device,)):
                return state.call(lambda: variables.run(call), device)

        return task

    def _lockstep(self, depth: int) -> Lockstep:
        while len(self.locksteps) <= depth or not self.locksteps[depth].usable:
            timeout = self._timeout_seconds
            new = Lockstep(self.names, schedule=self._schedule, timeout_seconds=timeout)
            self.locksteps[depth : depth + 1] = [new]
        return self.locksteps[depth]

    def check_usable(self) -> None:
        """Raises StrategyError after ``close``."""
        if self.is_closed:
            raise StrategyError(
                "this strategy is closed; create a new one (copy.deepcopy(model) gives an "
                "ordinary module to mirror there)"
            )

    def check_between_runs(self, what: str) -> None:
        """Raises StrategyError while replicas run, but for what runs in their merge."""
        is_ours = self.running is None or self.inside_merge()
        if not is_ours or (self.parallel_pass is not None and not self.parallel_pass.go_alone()):
            raise StrategyError(
                f"{what} was asked for by another thread while strategy.run, or backward, is "
                "going on; wait until it has returned"
            )

    def close(self) -> None:
        """Ends threads and the communicator; idempotent."""
        if self.running is not None or self.parallel_pass is not None:
            raise StrategyError("close() was called inside run; close the strategy after it")
        self.is_closed = True
        for lockstep in self.locksteps:
            lockstep.close()
        self.locksteps = []
        self.gradients.buckets.close()
        self.communicator.close()
        if self._simulates:
            give_back_freed_memory()
