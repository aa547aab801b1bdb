"""The tasks of replicas' threads: the user's function, as a replica, under the caller's state.

``replica_tasks`` returns one task per replica. A task makes two calls before the user's function:

    ThreadState.call    the thread gets the caller's grad mode, autocast, threads, streams, ...
    call_as             the replica becomes the current one, with its random stream

A single replica on the CPU runs in the caller's thread, which has this state: it needs only
``call_as``.

``serial_graphs`` has the graphs through which a backward pass outside ``run`` goes in the calling
thread.

[Note: Autograd's threads]
Autograd has a queue of ready nodes, and a thread, for each GPU, and the calling thread for the
CPU. A pass outside ``run`` goes through the graphs of all replicas: nodes of different GPUs run at
the same time, and have an order only within one queue. Some graphs need one order for all nodes:

    collectives             a node reads the gradients of all replicas
    saved random states     recomputed layers set the CPU's generator, which all replicas share
    saved_tensors_hooks     those around a split call serve the graphs of all replicas

Rule: an object that lives as long as such a graph is registered there, by a weak reference. While
one is alive, passes outside ``run`` disable autograd's threads; inside ``run`` all passes do.
Consequence: these passes enqueue the work of all GPUs from one thread; it still overlaps.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from mirror.base.timeline import FORWARD, last_used
from mirror.base.torch_private import num_function_modes, top_saved_tensors_hooks
from mirror.device.device_mesh import DeviceMesh
from mirror.device.streams import CallerStreams
from mirror.devices import backward_in_calling_thread, using
from mirror.execution.replicas import Replicas
from mirror.execution.run import Replica, Run, current, renaming
from mirror.threads.merge_point import Tasks
from mirror.threads.user_frames import annotate_error

_CPU = torch.device("cpu")


@dataclass(slots=True)
class ThreadState:
    """Torch's thread-local state of the caller, which replicas' threads take over.

    The default dtype, the deterministic flags and anomaly mode are global and need no copy.

    Attributes:
        num_threads: intra-op threads of the caller.
        num_threads_each: the part of these that each of the replicas at work gets.
        may_overlap: whether several replicas may compute at once, in this run or in another one.
        places: the device mesh, if replicas have several devices.
        streams: the current streams of the GPUs, if any. See ``streams.py``.
        is_plain: whether grad mode and number of threads are all that a new thread lacks.
        has_set_threads: whether ``call`` has changed the number of intra-op threads.
    """

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, torch.dtype], ...]
    autocast_cache: bool
    default_device: torch.device
    saved_tensors_hooks: Any
    num_threads: int
    num_threads_each: int
    may_overlap: bool
    streams: CallerStreams | None
    places: DeviceMesh | None = None
    is_plain: bool = False
    has_set_threads: bool = False
    _caller: int = field(default_factory=threading.get_ident)

    @classmethod
    def capture(cls, replicas: Replicas, sharers: int, *, may_overlap: bool) -> ThreadState:
        """Returns the state of the calling thread.

        Args:
            sharers: the number of replicas that compute at once and share the caller's threads.
            may_overlap: whether runs of this strategy may overlap, also if this one does not.
        """
        hooks = top_saved_tensors_hooks()
        if hooks is not None:
            unpack = hooks[1]
            serial_graphs.add(getattr(unpack, "__self__", unpack))  # a bound method dies at once
        num_threads, autocast = torch.get_num_threads(), list[tuple[str, torch.dtype]]()
        for kind in replicas.device_types:
            if torch.is_autocast_enabled(kind):
                autocast.append((kind, torch.get_autocast_dtype(kind)))
        state = cls(
            grad=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            autocast=tuple(autocast),
            autocast_cache=torch.is_autocast_cache_enabled() and not may_overlap,
            # A default device is a function mode; torch.get_default_device() takes 10 us.
            default_device=torch.get_default_device() if num_function_modes() else _CPU,
            saved_tensors_hooks=hooks,
            num_threads=num_threads,
            num_threads_each=max(1, num_threads // sharers),
            may_overlap=may_overlap,
            streams=None if replicas.are_simulated else CallerStreams(replicas.mesh.devices),
            places=replicas.mesh if replicas.mesh.is_model_parallel else None,
        )
        needs_contexts = state.inference or autocast or state.saved_tensors_hooks is not None
        is_default = state.default_device == _CPU and state.streams is None
        state.is_plain = is_default and state.places is None and not needs_contexts
        return state

    def call(self, device: torch.device, fn: Callable[..., Any], *args: Any) -> Any:
        """Calls ``fn(*args)`` for a replica under this state, in any thread; then restores it.

        A default GPU becomes the replica's own.
        """
        if torch.get_num_threads() != self.num_threads_each:
            torch.set_num_threads(self.num_threads_each)
            self.has_set_threads = True
        before = torch.is_grad_enabled()
        if before is not self.grad:
            torch.set_grad_enabled(self.grad)
        # All threads share autocast's cache of casts, and each clears it when it leaves autocast.
        # Whether a replica finds its cast of a weight there would depend on the clock. Also off
        # in the runs that take turns: the bits of a step do not depend on which of them did.
        cached = self.may_overlap and torch.is_autocast_cache_enabled()
        if cached:
            torch.set_autocast_cache_enabled(False)
        try:
            if self.is_plain:
                return fn(*args)
            with self._entering(device):
                return fn(*args)
        finally:
            if torch.is_grad_enabled() is not before:
                torch.set_grad_enabled(before)
            if cached:
                torch.set_autocast_cache_enabled(True)

    @contextmanager
    def _entering(self, device: torch.device) -> Iterator[None]:
        """Enters the contexts that the calling thread lacks; the caller's own lacks only some."""
        is_caller = threading.get_ident() == self._caller
        same_kind = self.default_device.type == device.type
        default_device = device if same_kind else self.default_device
        if self.places is not None:
            default_device = self.places.translate(self.default_device, device)
        with ExitStack() as stack:
            if default_device != (self.default_device if is_caller else _CPU):
                stack.enter_context(default_device)
            if self.streams is not None:  # also what a replica in the caller's thread sets ends
                stack.enter_context(self.streams.entering(device))
            if is_caller:
                yield
                return
            if self.inference:
                stack.enter_context(torch.inference_mode())
                torch.set_grad_enabled(self.grad)
            for kind, dtype in self.autocast:
                stack.enter_context(
                    torch.autocast(kind, dtype=dtype, cache_enabled=self.autocast_cache)
                )
            if self.saved_tensors_hooks is not None:
                hooks = torch.autograd.graph.saved_tensors_hooks(*self.saved_tensors_hooks)
                stack.enter_context(hooks)
            yield

    def restore(self) -> None:
        """Restores the caller's number of intra-op threads."""
        # Threads that start later take the number that was set last.
        torch.set_num_threads(self.num_threads)


def replica_tasks(run: Run, fn: Callable[[int], Any], state: ThreadState | None) -> Tasks:
    """Returns, for each active replica, a task that calls ``fn(replica_id)`` as that replica.

    Args:
        state: ``None`` for a single replica on the CPU, which runs in the caller's thread.
    """
    replicas = run.replicas
    strategy, timeline = replicas.strategy, replicas.timeline
    function = _remap_devices(run, fn) if replicas.mesh.is_model_parallel else fn

    def call_as(replica: Replica) -> Any:
        """Calls the function with the replica current; see [Note: Interrupts]."""
        replica_id = replica.replica_id
        before = current.replica, current.strategy, current.below
        try:
            current.below = before
            current.replica, current.strategy = replica, strategy
            # In a merge, this thread may run the cross-replica context.
            last_used.reference = timeline.reference
            timeline.mark((timeline.clock(), replica_id, FORWARD, ""))
            replica.has_begun = True
            swapped = run.swapped
            if swapped is not None and swapped.inside != replica_id:
                swapped.enter(replica_id)
            result = function(replica_id)
            for stepped in run.stepped.values():
                stepped.left[replica_id] = stepped.read_options()
            return result
        finally:
            current.replica, current.strategy, current.below = before
            timeline.mark((timeline.clock(), replica_id, FORWARD, None))
            if replica.lent:
                replica.give_back()

    tasks: Tasks = {}
    # A lone replica runs in the caller's thread.
    is_lone = len(run.active) == 1 and not replicas.mesh.is_model_parallel
    for replica_id, replica in run.members.items():
        if state is None or is_lone:
            tasks[replica_id] = partial(call_as, replica)
        else:
            enter = copy_context().run
            tasks[replica_id] = partial(state.call, replica.device, enter, call_as, replica)
        if not replicas.are_simulated:  # the CPU needs no device context
            call = tasks[replica_id]
            tasks[replica_id] = partial(_call_on_device, replica.device, call)
    return tasks


# Returns the recorded calls of a run by replica id; ``None`` if one of them has to run its code.
Replay = Callable[[Run], "dict[int, Callable[[], Any]] | None"]


def replay_calls(run: Run, calls: dict[int, Callable[[], Any]]) -> dict[int, Any]:
    """Makes recorded calls of the replicas; returns their results by replica id.

    A recorded call runs no code of the user, waits for no other replica, and launches its kernels
    without waiting for them. So the calls need no threads: they are made one after the other in
    the caller's thread, with its state.
    """
    replicas, timeline, results = run.replicas, run.replicas.timeline, dict[int, Any]()
    before = current.replica, current.strategy, current.below
    try:
        current.below, current.strategy = before, replicas.strategy
        for r, call in calls.items():
            replica = current.replica = run.members[r]
            timeline.mark((timeline.clock(), r, FORWARD, ""))
            replica.has_begun = True
            try:
                if replicas.are_simulated:
                    results[r] = call()
                else:
                    with using(replica.device):
                        results[r] = call()
            except BaseException as error:
                annotate_error(error, replicas.names[r])
                raise
            finally:
                timeline.mark((timeline.clock(), r, FORWARD, None))
        return results
    finally:
        current.replica, current.strategy, current.below = before


def _call_on_device(device: torch.device, call: Callable[[], Any]) -> Any:
    """Makes a replica's call with its GPU as the current device.

    Also a lone replica's: in autograd's threads it would not be the current one.
    """
    with using(device), backward_in_calling_thread((device,)):
        return call()


def _remap_devices(run: Run, fn: Callable[[int], Any]) -> Callable[[int], Any]:
    """Returns ``fn`` with the names of devices mapped to the replica's own. [Note: Places]."""

    def call(replica_id: int) -> Any:
        with renaming(run.members[replica_id]):
            return fn(replica_id)

    return call


class SerialGraphs:
    """Objects that graphs hold, for as long as they are alive.

    Attributes:
        alive: the weak references, by the ``id`` of the object; empty if no object is alive.
    """

    def __init__(self) -> None:
        self.alive: dict[int, Any] = {}

    def add(self, part: object) -> None:
        """Adds an object of a graph."""
        alive, key = self.alive, id(part)
        try:
            # A garbage collection may call this at any time: it takes no lock.
            alive[key] = weakref.ref(part, lambda _: alive.pop(key, None))
        except TypeError:  # its class has no weak references: it counts as alive from now on
            alive[key] = part


serial_graphs = SerialGraphs()
