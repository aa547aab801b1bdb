"""The task of a replica's thread: the user's function under the caller's thread-local state."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from mirror.base.timeline import FORWARD
from mirror.base.torch_private import num_function_modes, set_grad_enabled, top_saved_tensors_hooks
from mirror.device.current_streams import CallerStreams
from mirror.device.device_mesh import DeviceMesh
from mirror.devices import backward_in_calling_thread, using
from mirror.execution.current_replica import current, push_context, renaming, save_context
from mirror.execution.replicas import Replicas
from mirror.execution.run_state import Run

_CPU = torch.device("cpu")


@dataclass(slots=True)
class ThreadState:
    """Torch's thread-local state of the caller, which replicas' threads take over.

    The default dtype, the deterministic flags and anomaly mode are global and need no copy.

    Attributes:
        num_threads: intra-op threads of the caller.
        sharers: the number of replicas that compute at once and share these threads.
        places: the device mesh, if replicas have several devices.
        streams: the current streams of the GPUs, if any. See [Note: Whose stream is current].
    """

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, torch.dtype], ...]
    autocast_cache: bool
    default_device: torch.device
    saved_tensors_hooks: Any
    num_threads: int
    sharers: int
    streams: CallerStreams | None
    places: DeviceMesh | None = None
    _has_set_threads: bool = False
    _caller: int = field(default_factory=threading.get_ident)

    @classmethod
    def capture(cls, replicas: Replicas, sharers: int) -> ThreadState:
        """Returns the state of the calling thread."""
        return cls(
            grad=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            autocast=tuple(
                (kind, torch.get_autocast_dtype(kind))
                for kind in replicas.device_types
                if torch.is_autocast_enabled(kind)
            ),
            autocast_cache=torch.is_autocast_cache_enabled() and sharers == 1,
            # A default device is a function mode; torch.get_default_device() takes 10 us.
            default_device=torch.get_default_device() if num_function_modes() else _CPU,
            saved_tensors_hooks=top_saved_tensors_hooks(),
            num_threads=torch.get_num_threads(),
            sharers=sharers,
            streams=(None if replicas.are_simulated else CallerStreams(replicas.places.devices)),
            places=replicas.places if replicas.places.is_model_parallel else None,
        )

    def call(self, fn: Callable[[], Any], device: torch.device) -> Any:
        """Calls ``fn`` for a replica under this state, in any thread, and then restores the state.

        A default GPU becomes the replica's own.
        """
        num_threads = max(1, self.num_threads // self.sharers)
        if torch.get_num_threads() != num_threads:
            torch.set_num_threads(num_threads)
            self._has_set_threads = True
        before = torch.is_grad_enabled()
        set_grad_enabled(self.grad)
        # All threads share autocast's cache of casts, and each clears it when it leaves autocast.
        # Whether a replica finds its cast of a weight there would depend on the clock.
        cached = self.sharers > 1 and torch.is_autocast_cache_enabled()
        if cached:
            torch.set_autocast_cache_enabled(False)
        try:
            is_caller = threading.get_ident() == self._caller  # it has this state already
            if not is_caller and self._needs_contexts():
                fn = partial(self._call_in_contexts, fn)
            if self.streams is not None and not is_caller:
                fn = partial(_call_in, self.streams, device, fn)
            same_kind = self.default_device.type == device.type
            default_device = device if same_kind else self.default_device
            if self.places is not None:
                default_device = self.places.translate(self.default_device, device)
            if default_device == (self.default_device if is_caller else _CPU):
                return fn()
            with default_device:
                return fn()
        finally:
            set_grad_enabled(before)
            if cached:
                torch.set_autocast_cache_enabled(True)

    def _needs_contexts(self) -> bool:
        """Whether the state differs from that of a new thread."""
        return bool(self.inference or self.autocast or self.saved_tensors_hooks is not None)

    def _call_in_contexts(self, fn: Callable[[], Any]) -> Any:
        with ExitStack() as stack:
            if self.inference:
                stack.enter_context(torch.inference_mode())
                set_grad_enabled(self.grad)
            for kind, dtype in self.autocast:
                stack.enter_context(
                    torch.autocast(kind, dtype=dtype, cache_enabled=self.autocast_cache)
                )
            if self.saved_tensors_hooks is not None:
                hooks = torch.autograd.graph.saved_tensors_hooks(*self.saved_tensors_hooks)
                stack.enter_context(hooks)
            return fn()

    def restore(self) -> None:
        """Restores the caller's number of intra-op threads."""
        # Threads that start later take the number that was set last.
        if self._has_set_threads:
            torch.set_num_threads(self.num_threads)


def _call_in(streams: CallerStreams, device: torch.device, fn: Callable[[], Any]) -> Any:
    with streams.entered(device):
        return fn()


def task_of(
    run: Run, replica_id: int, fn: Callable[[int], Any], state: ThreadState | None
) -> Callable[[], Any]:
    """Returns a task that calls ``fn(replica_id)`` as that replica, under the caller's state.

    Args:
        state: ``None`` for a single replica on the CPU, which runs in the caller's thread.
    """
    replica, replicas = run.members[replica_id], run.replicas
    device = replica.device
    strategy, timeline = replicas.strategy, replicas.timeline

    def call() -> Any:
        before = save_context()
        try:
            push_context(strategy, replica)
            timeline.use()  # in a merge, this thread may run the cross-replica context
            timeline.begin(replica_id, FORWARD)
            replica.has_begun = True
            return _call(fn, run, replica_id)
        finally:
            current.replica, current.strategy, current.below = before
            timeline.end(replica_id, FORWARD)
            if replica.lent:
                replica.give_back()

    if state is None:
        return call
    variables = copy_context()

    def renamed() -> Any:
        with renaming(replica):
            return call()

    def task() -> Any:
        if replicas.places.is_model_parallel:
            with using(device), backward_in_calling_thread((device,)):
                return state.call(partial(variables.run, renamed), device)
        if len(run.active) == 1:
            with using(device):
                return call()
        if replicas.are_simulated:  # the CPU needs no device context
            return state.call(partial(variables.run, call), device)
        with using(device), backward_in_calling_thread((device,)):
            return state.call(partial(variables.run, call), device)

    return task


def _call(fn: Callable[[int], Any], run: Run, replica_id: int) -> Any:
    """Calls a replica's function with the replica's random stream."""
    if run.streams is not None and run.streams.inside != replica_id:
        run.streams.enter(replica_id)
    result = _measured(fn, run, replica_id) if run.stopwatches else fn(replica_id)
    if run.stepped:
        for optimizer, options in run.stepped.items():
            options[replica_id] = optimizer.options()
    return result


def _measured(fn: Callable[[int], Any], run: Run, replica_id: int) -> Any:
    watch = run.stopwatches[replica_id]
    watch.start()
    try:
        return fn(replica_id)
    finally:
        watch.stop()
