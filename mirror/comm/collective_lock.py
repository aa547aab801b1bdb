"""CollectiveLock: serializes the collectives of one communicator, on the host and on the devices.

Problem: buckets of gradients are reduced on side streams, while a collective of the backward pass
(SyncBatchNorm) is reduced on the computation streams, and the user's threads may share a
communicator. But its flags, counters and scratch memory serve one collective at a time.
Rule: a collective holds a lock on the host. On every GPU it waits for the event of the previous
collective, if that was on another stream.
Consequence: all GPUs run all collectives in one order. In different orders, two collectives could
wait for each other.

    computation    ...[ backward ][wait a][ sum of SyncBatchNorm ] b
    side           ...[wait ...][ bucket 1 ] a          [wait b][ bucket 2 ]

The owner of the lock never waits for a thread that needs it: a collective has the tensors of all
replicas when it starts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial, wraps
from time import monotonic, sleep
from typing import Any

import torch

from mirror.base.mutex import Mutex
from mirror.base.process_bound import reinit_after_fork

# How long an exception waits for collectives in flight: longer than they take if nothing is wrong.
PATIENCE_SECONDS = 5.0
_POLL_SECONDS = 0.01


class CollectiveLock:
    """The reentrant lock of one communicator, for the host and its GPUs."""

    def __init__(self) -> None:
        self._mutex = Mutex()
        self._is_held = False
        # The stream of each GPU's last collective, and the event behind it.
        self._last: dict[torch.device, tuple[torch.cuda.Stream, torch.cuda.Event]] = {}
        reinit_after_fork(self)

    def after_fork(self) -> None:
        """Clears the owner in a forked process."""
        self._mutex, self._is_held = Mutex(), False

    def call(self, collective: Callable[[], Any], devices: Sequence[torch.device]) -> Any:
        """Calls a collective; on each GPU it is enqueued behind the previous one."""
        lock = self._mutex.lock
        try:
            lock.acquire()
            if self._is_held:
                return collective()
            gpus = [device for device in dict.fromkeys(devices) if device.type == "cuda"]
            try:
                self._is_held = True
                for gpu in gpus:
                    self._wait_for_previous(gpu)
                return collective()
            finally:
                self._is_held = False
                # After an error as well: part of the collective may be enqueued.
                for gpu in gpus:
                    self._record(gpu)
        finally:
            try:  # noqa: SIM105
                lock.release()
            except RuntimeError:  # see Mutex
                pass

    def is_over(self) -> bool:
        """Returns whether the last collective is done on every GPU; does not wait."""
        return all(event.query() for _, event in tuple(self._last.values()))

    def _wait_for_previous(self, gpu: torch.device) -> None:
        stream = torch.cuda.current_stream(gpu)
        if gpu in self._last and self._last[gpu][0] != stream:
            stream.wait_event(self._last[gpu][1])

    def _record(self, gpu: torch.device) -> None:
        stream = torch.cuda.current_stream(gpu)
        event = self._last[gpu][1] if gpu in self._last else torch.cuda.Event()
        event.record(stream)
        self._last[gpu] = stream, event


class LaunchOrder:
    """Serializes the launches of all communicators of this process: ``launch_order``.

    Problem: two threads, with a communicator each, could launch collectives on one GPU's stream in
    one order and on another GPU's in the other. Each collective would then wait for the other.
    Rule: all kernels of a collective are launched before the next one's, on every GPU.
    Consequence: collectives of different communicators on different streams may still overlap;
    both are resident at once, because by default neither takes more than half of a GPU
    (``cuda_kernels.default_limits``).

    Attributes:
        mutex: held during the launch only, which waits for no other thread of Python.
    """

    def __init__(self) -> None:
        self.mutex = Mutex()
        reinit_after_fork(self)

    def after_fork(self) -> None:
        self.mutex = Mutex()


launch_order = LaunchOrder()


def hold_lock(method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a method that holds the communicator's lock while it runs."""
    if getattr(method, "_is_serialized", False):
        return method

    @wraps(method)
    def call_locked(self: Any, *args: Any, **kwargs: Any) -> Any:
        return lock_of(self).call(partial(method, self, *args, **kwargs), self.devices)

    call_locked._is_serialized = True  # type: ignore[attr-defined]
    return call_locked


def lock_of(communicator: object) -> CollectiveLock:
    """Returns a communicator's lock, even if its class does not call our constructor."""
    known = communicator.__dict__.get("_collective_lock")
    if known is None:  # setdefault is atomic: two threads get the same lock
        known = communicator.__dict__.setdefault("_collective_lock", CollectiveLock())
    lock: CollectiveLock = known
    return lock


def cannot_wait_for(is_over: Callable[[], bool]) -> bool:
    """Returns whether an exception propagates and collectives do not end within some seconds."""
    error = sys.exc_info()[1]
    deadline = monotonic() + PATIENCE_SECONDS
    while isinstance(error, BaseException) and not is_over():
        if monotonic() > deadline:
            return True
        sleep(_POLL_SECONDS)
    return False
