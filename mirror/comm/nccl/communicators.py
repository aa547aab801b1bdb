"""NCCL communicators of this process, their operations in flight, and the errors of both.

A clique may have several processes, each with the ranks of its own devices. They share an
identifier, which one process creates with ``new_identifier`` and sends to the others.

Problem: recording an event on each of 8 devices takes longer than NCCL's calls.
Rule: if no replica's part can end before all other parts have started (``are_joint``), only the
last device records an event.
Consequence: after this event, all replicas have started the collective, and the next operation
involves all devices again. If the event is late, the other streams are queried to name the late
replicas.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from mirror.comm.nccl.libnccl import (
    IN_PROGRESS,
    SUCCESS,
    NcclLibrary,
    UniqueId,
    non_blocking,
    version_name,
)
from mirror.device.streams import Event, is_stream_idle
from mirror.devices import using
from mirror.errors import BackendError, CollectiveTimeoutError


@dataclass
class Work:
    """One collective, or the creation or end of the communicators.

    Attributes:
        seconds: the time from its start to the deadline.
        streams: the addresses of the streams that it was enqueued on, one per replica.
        events: recorded behind it: one per replica, or only that of the last replica.
    """

    what: str
    seconds: float
    deadline: float
    streams: Sequence[int] = ()
    events: list[Event] = field(default_factory=list)

    def is_done(self) -> bool:
        """Returns whether the devices are done with it; does not wait."""
        return all(event.query() for event in self.events)

    def late_replicas(self, devices: Sequence[torch.device]) -> str:
        """Returns the names of the replicas that are not done, for messages."""
        num_without_event = len(devices) - len(self.events)
        late = []
        for i, device in enumerate(devices):
            if i < num_without_event:
                is_done = is_stream_idle(device, self.streams[i])
            else:
                is_done = self.events[i - num_without_event].query()
            if not is_done:
                late.append(f"replica {i} ({device})")
        return ", ".join(late)


class RankRange(NamedTuple):
    """The ranks of this process in a clique of several processes.

    Attributes:
        first: the rank of its first device; the other devices follow.
        size: the number of ranks of all processes.
        identifier: of the clique.
    """

    first: int
    size: int
    identifier: bytes


def new_identifier(library: NcclLibrary) -> bytes:
    """Returns an identifier for a new clique.

    Raises:
        BackendError: NCCL fails.
    """
    unique_id = UniqueId()
    result = library.call("ncclGetUniqueId", ctypes.byref(unique_id))
    if result != SUCCESS:
        raise BackendError(f"ncclGetUniqueId returned {library.explain(result)}")
    return bytes(unique_id)


class Communicators:
    """The handles of one communicator per replica.

    Args:
        ranks: of these devices; with None, replica ``i`` is rank ``i``.

    Attributes:
        handles: one per replica; None before it is created and after its end.
    """

    def __init__(
        self, library: NcclLibrary, devices: Sequence[torch.device], ranks: RankRange | None
    ) -> None:
        self._library = library
        self._devices = tuple(devices)
        self._ranks = ranks
        self.handles = self._null_handles()

    def identify(self, call: Callable[..., int]) -> tuple[int, int, UniqueId]:
        """Returns the first rank, the number of ranks, and the identifier.

        Args:
            call: calls a function of NCCL.
        """
        if self._ranks is not None:
            first, size, identifier = self._ranks
            return first, size, UniqueId.from_buffer_copy(identifier)
        unique_id = UniqueId()
        call("ncclGetUniqueId", ctypes.byref(unique_id))
        return 0, len(self._devices), unique_id

    def make(self, ranks: tuple[int, int, UniqueId], call: Callable[..., int]) -> None:
        """Starts to create the communicators, as a group.

        Args:
            ranks: the result of ``identify``.
            call: calls a function of NCCL.
        """
        first, size, unique_id = ranks
        config = non_blocking()
        for replica_id, device in enumerate(self._devices):
            handle = ctypes.c_void_p()
            try:
                with using(device):  # the only function that uses the current device
                    call(
                        "ncclCommInitRankConfig",
                        ctypes.byref(handle),
                        size,
                        unique_id,
                        first + replica_id,
                        ctypes.byref(config),
                    )
            finally:
                self.handles[replica_id] = handle.value

    def end(self, function: str, seconds: float) -> dict[int, int] | None:
        """Ends all communicators with a function of NCCL; see ``end_each``."""
        handles, self.handles = self.handles, self._null_handles()
        return self.end_each(function, handles, seconds)

    def end_each(
        self, function: str, handles: Iterable[int | None], seconds: float
    ) -> dict[int, int] | None:
        """Calls a function of NCCL on communicators, in a new thread, since it may not return.

        Returns:
            The results by handle, of handles for which it failed; ``None`` if it has not returned.
        """
        failed: dict[int, int] = {}

        def end() -> None:
            # In turn: NCCL does the work for all of them in the last call.
            for handle in filter(None, handles):
                result = self._library.call(function, handle)
                if result not in (SUCCESS, IN_PROGRESS):
                    failed[handle] = result

        thread = threading.Thread(target=end, name=f"mirror-{function}", daemon=True)
        thread.start()
        thread.join(min(max(seconds, 0.0), threading.TIMEOUT_MAX))
        return None if thread.is_alive() else failed

    def _null_handles(self) -> ctypes.Array[ctypes.c_void_p]:
        return (ctypes.c_void_p * len(self._devices))()


_ABORTED = (
    "its communicators were aborted, and what was reduced last may be garbage: make another "
    "strategy"
)

# GPUs that cannot access each other's memory exchange through shared memory: some 10 MB per pair
# and channel. Docker's default is 64 MB.
_SHARED_MEMORY, _ENOUGH_BYTES = "/dev/shm", 2**29
_SHORTAGE_WORDS = ("ncclSystemError", "shared memory", "/shm", "No space left")


def nccl_error(version: int, what: str, devices: Sequence[torch.device], why: str) -> BackendError:
    where = ", ".join(map(str, devices))
    return BackendError(
        f"NCCL {version_name(version)} failed at {what} on {where}: {why}{_hint(why)}; {_ABORTED}"
    )


def timeout_message(
    seconds: float, what: str, devices: Sequence[torch.device], state: str
) -> CollectiveTimeoutError:
    where = ", ".join(map(str, devices))
    return CollectiveTimeoutError(
        f"NCCL must be done within {seconds:g} s; {what} on {where} was not: {state}; see what "
        f"the devices were doing, or allow more with timeout_seconds; {_ABORTED}"
    )


def _hint(why: str) -> str:
    """Returns a remedy if a shortage of shared memory may be the reason, or ""."""
    if not any(word in why for word in _SHORTAGE_WORDS):
        return ""
    try:
        stats = os.statvfs(_SHARED_MEMORY)
    except OSError:
        return ""
    size = stats.f_blocks * stats.f_frsize
    if size >= _ENOUGH_BYTES:
        return ""
    return (
        f"; {_SHARED_MEMORY} has {size >> 20} MiB, in which NCCL joins GPUs that do not reach "
        "each other: give a container more, for instance docker run --shm-size=1g"
    )
