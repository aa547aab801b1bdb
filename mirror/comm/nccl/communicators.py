"""NCCL communicators of this process, and their operations until the devices have finished them.

[Note: One witness]
To record an event on each of 8 devices takes longer than NCCL's calls. Where no replica's part can
end before all the others' have begun (``are_joint``), the last device's event stands for all: once
it has happened, all replicas are done, and the next operation again involves all devices. If it
has not happened in time, the other streams are queried, to name the late replicas.

A clique may reach over several processes, each with the ranks of its own devices; what they have
in common is an identifier, which one of them makes (``new_identifier``) and tells the others.

What is said when NCCL fails, or does not come to an end.
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
from mirror.device.events import Event, is_stream_idle
from mirror.devices import using
from mirror.errors import BackendError, CollectiveTimeoutError


@dataclass
class Work:
    """One collective, or the making or ending of communicators.

    Attributes:
        seconds: how long it may take, which is until the deadline.
        streams: the addresses of those it was enqueued on, one per replica.
        events: what happens when it is done: one per replica, or the last replica's alone.
    """

    what: str
    seconds: float
    deadline: float
    streams: Sequence[int] = ()
    events: list[Event] = field(default_factory=list)

    def is_done(self) -> bool:
        """Whether the devices are done with it; does not wait."""
        return all(event.query() for event in self.events)

    def timeout_message(self, devices: Sequence[torch.device]) -> str:
        """Returns the replicas that are not known to be done."""
        unasked = len(devices) - len(self.events)
        who = []
        for i, device in enumerate(devices):
            if i < unasked:
                is_done = is_stream_idle(device, self.streams[i])
            else:
                is_done = self.events[i - unasked].query()
            if not is_done:
                who.append(f"replica {i} ({device})")
        return ", ".join(who)


class RankRange(NamedTuple):
    """Where this process's devices stand in a clique of several processes.

    Attributes:
        first: the rank of its first device; the others follow.
        size: the number of ranks of all processes.
        identifier: the clique's.
    """

    first: int
    size: int
    identifier: bytes


def new_identifier(library: NcclLibrary) -> bytes:
    """Returns the identifier of a clique that is to be made.

    Raises:
        BackendError: NCCL refuses.
    """
    unique_id = UniqueId()
    result = library.call("ncclGetUniqueId", ctypes.byref(unique_id))
    if result != SUCCESS:
        raise BackendError(f"ncclGetUniqueId returned {library.explain(result)}")
    return bytes(unique_id)


class Communicators:
    """The handles of one communicator per replica.

    Args:
        place: which rank replica 0 is, of how many; ``None``: replica ``i`` is rank ``i``.

    Attributes:
        handles: one that is not there, not yet or no longer, is ``None``.
    """

    def __init__(
        self, library: NcclLibrary, devices: Sequence[torch.device], place: RankRange | None
    ) -> None:
        self._library = library
        self._devices = tuple(devices)
        self._place = place
        self.handles = self._none()

    def identified(self, call: Callable[..., int]) -> tuple[int, int, UniqueId]:
        """Returns the first rank, the number of ranks, and what they have in common.

        Args:
            call: calls a function of NCCL.
        """
        if self._place is not None:
            first, size, identifier = self._place
            return first, size, UniqueId.from_buffer_copy(identifier)
        unique_id = UniqueId()
        call("ncclGetUniqueId", ctypes.byref(unique_id))
        return 0, len(self._devices), unique_id

    def make(self, ranks: tuple[int, int, UniqueId], call: Callable[..., int]) -> None:
        """Begins to make them, as a group.

        Args:
            ranks: as ``identified`` has returned them.
            call: calls a function of NCCL.
        """
        first, size, unique_id = ranks
        config = non_blocking()
        for replica_id, device in enumerate(self._devices):
            handle = ctypes.c_void_p()
            try:
                with using(device):  # the only function that cares for the current device
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
        """Forgets them all and calls a function that ends them; see ``end_each``."""
        handles, self.handles = self.handles, self._none()
        return self.end_each(function, handles, seconds)

    def end_each(
        self, function: str, handles: Iterable[int | None], seconds: float
    ) -> dict[int, int] | None:
        """Calls a function on communicators, in a thread of its own, for it may not return.

        Returns:
            What came of those for which it failed; ``None`` if that is not known in time.
        """
        failed: dict[int, int] = {}

        def end() -> None:
            # One after the other: NCCL does the work of all at the last.
            for handle in filter(None, handles):
                result = self._library.call(function, handle)
                if result not in (SUCCESS, IN_PROGRESS):
                    failed[handle] = result

        thread = threading.Thread(target=end, name=f"mirror-{function}", daemon=True)
        thread.start()
        thread.join(min(max(seconds, 0.0), threading.TIMEOUT_MAX))
        return None if thread.is_alive() else failed

    def _none(self) -> ctypes.Array[ctypes.c_void_p]:
        return (ctypes.c_void_p * len(self._devices))()


_ABORTED = (
    "its communicators were aborted, and what was reduced last may be garbage: make another "
    "strategy"
)

# Where GPUs do not reach each other's memory, NCCL has them meet there: some 10 MB a pair and
# channel. Docker gives 64 MB.
_SHARED_MEMORY, _ENOUGH_BYTES = "/dev/shm", 2**29
_SIGNS = ("ncclSystemError", "shared memory", "/shm", "No space left")


def failure_message(
    version: int, what: str, devices: Sequence[torch.device], why: str
) -> BackendError:
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
    """Returns a remedy where memory that processes share is short, and may be the reason."""
    if not any(sign in why for sign in _SIGNS):
        return ""
    try:
        found = os.statvfs(_SHARED_MEMORY)
    except OSError:
        return ""
    size = found.f_blocks * found.f_frsize
    if size >= _ENOUGH_BYTES:
        return ""
    return (
        f"; {_SHARED_MEMORY} has {size >> 20} MiB, in which NCCL joins GPUs that do not reach "
        "each other: give a container more, as by docker run --shm-size=1g"
    )
