"""CollectiveLock: serializes the collectives of one communicator, on the host and on the devices.

[Note: One collective at a time]
Buckets of gradients are reduced on side streams, or in a side thread, while a collective inside
the backward pass (SyncBatchNorm) is reduced on the streams of computation; and threads of the user
may share a communicator. What a communicator keeps between its calls (flags, counters, scratch)
serves one collective at a time. So a collective takes its turn: a lock for the host, and on every
GPU an event that the next collective on another stream waits for. All GPUs then see all
collectives in one order, without which two that wait for each other could.

    computation    ...[ backward ][wait a][ sum of SyncBatchNorm ] b
    side           ...[wait ...][ bucket 1 ] a          [wait b][ bucket 2 ]

The owner of the lock never waits for a thread that needs it: a collective has the tensors of all
replicas when it starts.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial, wraps
from time import monotonic, sleep
from typing import Any

import torch

from mirror.base.at_fork import reinit_after_fork

# How long an exception waits for collectives under way: longer than what has no reason to stand.
PATIENCE_SECONDS = 5.0
_POLL_SECONDS = 0.01


class CollectiveLock:
    """The turn of one communicator, which one thread has at a time.

    Any thread may take it, also again while it has it: a collective may be made of others.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._is_taken = False
        # Where each GPU's last collective was enqueued, and what happens when it is done.
        self._last: dict[torch.device, tuple[torch.cuda.Stream, torch.cuda.Event]] = {}
        reinit_after_fork(self)

    def after_fork(self) -> None:
        """Clears the owner in a forked process."""
        self._lock, self._is_taken = threading.RLock(), False

    def call(self, collective: Callable[[], Any], devices: Sequence[torch.device]) -> Any:
        """Has what a collective enqueues wait for what was enqueued in the turn before."""
        # No context manager of Python's: an interrupt may come between its end and our beginning.
        with self._lock:
            if self._is_taken:
                return collective()
            gpus = [device for device in dict.fromkeys(devices) if device.type == "cuda"]
            try:
                self._is_taken = True
                for gpu in gpus:
                    self._follow(gpu)
                return collective()
            finally:
                self._is_taken = False
                # Also after an error: it is unknown what has been enqueued by then.
                for gpu in gpus:
                    self._leave(gpu)

    def is_over(self) -> bool:
        """Whether the last collective is done on every GPU; does not wait."""
        return all(event.query() for _, event in tuple(self._last.values()))

    def _follow(self, gpu: torch.device) -> None:
        stream = torch.cuda.current_stream(gpu)
        if gpu in self._last and self._last[gpu][0] != stream:
            stream.wait_event(self._last[gpu][1])

    def _leave(self, gpu: torch.device) -> None:
        stream = torch.cuda.current_stream(gpu)
        event = self._last[gpu][1] if gpu in self._last else torch.cuda.Event()
        event.record(stream)
        self._last[gpu] = stream, event


def serialized(method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a method of a communicator that takes the communicator's turn."""
    if getattr(method, "_takes_turn", False):
        return method

    @wraps(method)
    def taking_turn(self: Any, *args: Any, **kwargs: Any) -> Any:
        return lock_of(self).call(partial(method, self, *args, **kwargs), self.devices)

    taking_turn._takes_turn = True  # type: ignore[attr-defined]
    return taking_turn


def lock_of(communicator: object) -> CollectiveLock:
    """Returns a communicator's turn, whether or not its class calls our constructor."""
    known = communicator.__dict__.get("_turn")
    # One of two threads that come first at once makes it: this is a single step of the dict.
    turn: CollectiveLock = known or communicator.__dict__.setdefault("_turn", CollectiveLock())
    return turn


def cannot_wait_for(is_over: Callable[[], bool]) -> bool:
    """Whether an exception is under way, and collectives do not end in the time that it waits."""
    error = sys.exc_info()[1]
    deadline = monotonic() + PATIENCE_SECONDS
    while isinstance(error, BaseException) and not is_over():
        if monotonic() > deadline:
            return True
        sleep(_POLL_SECONDS)
    return False
