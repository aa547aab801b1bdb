"""The clique: NCCL communicators of this process, one per device, called and ended together.

Problem: NCCL has no timeout. A kernel that waits for a missing peer spins until its communicator
is aborted, and an aborted communicator is freed, so no call to it may follow.
Rule: communicators are non-blocking, and a caller polls a call in progress up to its deadline. A
watchdog thread queries the events behind enqueued work, and NCCL's asynchronous errors. A thread
that finds an error stores it and aborts *all* communicators. Each call holds ``_mutex``, and
checks for a stored error first. If a call itself does not return, the watchdog aborts without the
mutex, which makes NCCL return.
Consequence: the watchdog cannot raise its error, so the next call does. The outputs of an aborted
collective are garbage on every device.

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
import logging
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic, sleep
from typing import NamedTuple

import torch

from mirror.comm.collective_lock import launch_order
from mirror.comm.nccl.libnccl import (
    IN_PROGRESS,
    SUCCESS,
    Call,
    NcclLibrary,
    UniqueId,
    are_joint,
    non_blocking,
    version_name,
)
from mirror.device.streams import (
    Event,
    is_stream_idle,
    query_without_breaking_capture,
    record_event,
    stream_address,
)
from mirror.devices import using
from mirror.errors import BackendError, CollectiveTimeoutError, MirrorError

_WATCH_SECONDS = 0.05
# NCCL enqueues a group in a thread of its own, in some 10 us; nothing may be enqueued before that.
# A sleep takes at least three times as long, so a caller polls without a sleep at first.
_SPIN_SECONDS, _FIRST_POLL_SECONDS, _LAST_POLL_SECONDS = 200e-6, 20e-6, 5e-3
# A call that is this late after its deadline counts as one that does not return.
_HANG_SECONDS = 0.2
# An abort that takes longer continues in the background.
_ABORT_SECONDS = 0.3

_logger = logging.getLogger("mirror")


class _CallRefused(Exception):
    """A call to NCCL failed, or an operation that it started, or the clique was aborted."""


class Clique:
    """One communicator per replica; in one process, replica ``i`` is rank ``i``.

    Any thread may call it; operations are serialized. Cliques over the same GPUs may be called
    from several threads: ``launch_order`` gives their collectives one order on all GPUs. Those of
    several processes must not be: no lock orders threads of different processes.
    """

    def __init__(
        self,
        library: NcclLibrary,
        devices: Sequence[torch.device],
        timeout_seconds: float,
        init_seconds: float,
        ranks: RankRange | None = None,
    ) -> None:
        """Creates the communicators.

        Args:
            timeout_seconds: the limit of an operation.
            init_seconds: the limit of creating the communicators.
            ranks: of these devices, if the clique has several processes.

        Raises:
            BackendError: NCCL fails.
            CollectiveTimeoutError: NCCL is not done in time.
        """
        self._library = library
        self._devices = tuple(devices)
        self.timeout_seconds = timeout_seconds
        self._ranks = ranks
        self._handles = self._null_handles()  # null before its creation and after its end
        self._state_word = ctypes.c_int(SUCCESS)  # used only by the owner of the mutex
        self._state_address = ctypes.byref(self._state_word)
        self._operation_lock = threading.Lock()
        self._mutex = threading.Lock()
        self._failure: MirrorError | None = None
        self._failure_was_raised = False
        self._closed = False
        self._abandoned = False
        self._calling: Work | None = None
        self._in_flight: deque[Work] = deque()
        self._stop = threading.Event()
        self._watchdog = threading.Thread(target=self._watch, name="mirror-nccl", daemon=True)
        self._watchdog.start()
        try:
            with self._operation("making its communicators", init_seconds):
                self._make()
        except BaseException:
            self._closed = True
            self._stop_watchdog()
            # A call may have created some after the abort of the others.
            self._end("ncclCommAbort", _ABORT_SECONDS)
            raise

    def run(self, what: str, calls: Sequence[Call]) -> None:
        """Enqueues the calls on each device's current stream, as one group.

        Raises:
            BackendError: NCCL fails, or an earlier operation has failed.
            CollectiveTimeoutError: this operation or an earlier one is not done in time.
        """
        with self._operation(what) as operation:
            streams = operation.streams = [stream_address(device) for device in self._devices]
            handles = self._handles

            def enqueue() -> None:
                for replica_id, function, arguments in calls:
                    self._call_locked(
                        function, *arguments, handles[replica_id], streams[replica_id]
                    )

            def launch() -> None:
                operation.deadline = monotonic() + operation.seconds
                with self._mutex:
                    result = self._group(enqueue, self._call_locked)
                self._settle(result)

            if self._ranks is None:
                # While another clique's launch does not end, its deadline counts, not this one's.
                operation.deadline = math.inf
                launch_order.mutex.call(launch)
            else:  # it may wait for other processes
                launch()
            num_replicas = len(self._devices)
            # See the docstring of this file.
            first = num_replicas - 1 if are_joint(calls, num_replicas) else 0
            operation.events = [record_event(device) for device in self._devices[first:]]
            if not operation.is_done():
                self._in_flight.append(operation)

    def close(self) -> None:
        """Waits for operations in flight, and destroys the communicators; idempotent.

        Raises:
            BackendError, CollectiveTimeoutError: that failed, or an earlier operation failed and
                its error has not been raised yet.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self._finish()
        finally:
            self._stop_watchdog()

    def check(self) -> None:
        """Raises the stored error, if there is one."""
        self._raise_failure()

    def is_idle(self) -> bool:
        """Returns whether all enqueued operations are done, or have failed."""
        return not self._in_flight or self._failure is not None

    def abort(self, *, is_reported: bool = False) -> None:
        """Aborts the clique, from any thread; if ``is_reported``, ``close`` does not raise."""
        active = [operation.what for operation in (self._calling, *self._in_flight) if operation]
        self._abort_with(
            self._make_failure(", ".join(active[:1]) or "rest", "it was told to abort")
        )
        self._failure_was_raised |= is_reported

    def abandon(self) -> None:
        """Makes the watchdog close the clique, for finalizers, which run in any thread."""
        self._abandoned = True
        self._stop.set()

    # - In the caller's thread

    @contextmanager
    def _operation(self, what: str, seconds: float | None = None) -> Iterator[Work]:
        """Serializes operations; any error inside ``with`` aborts the clique."""
        with self._operation_lock:
            self._raise_failure()
            seconds = self.timeout_seconds if seconds is None else seconds
            operation = Work(what, seconds, monotonic() + seconds)
            self._calling = operation
            try:
                yield operation
            except _CallRefused as refused:
                self._abort_with(self._make_failure(what, str(refused)))
                self._raise_failure()
            except BaseException as error:
                # For instance Ctrl-C: part of the operation may be enqueued.
                self._abort_with(
                    self._make_failure(what, f"a {type(error).__name__} broke it off")
                )
                self._failure_was_raised = True
                raise
            finally:
                self._calling = None

    def _make(self) -> None:
        if self._ranks is None:
            first, size, unique_id = 0, len(self._devices), UniqueId()
            self._call("ncclGetUniqueId", ctypes.byref(unique_id))
        else:
            first, size, identifier = self._ranks
            unique_id = UniqueId.from_buffer_copy(identifier)
        config = non_blocking()

        def make_each() -> None:
            for replica_id, device in enumerate(self._devices):
                handle = ctypes.c_void_p()
                try:
                    with using(device):  # the only function that uses the current device
                        self._call(
                            "ncclCommInitRankConfig",
                            ctypes.byref(handle),
                            size,
                            unique_id,
                            first + replica_id,
                            ctypes.byref(config),
                        )
                finally:
                    self._handles[replica_id] = handle.value

        self._settle(self._group(make_each, self._call))

    def _group(self, make_calls: Callable[[], None], call: Callable[[str], int]) -> int:
        """Makes the calls as one group; returns SUCCESS or IN_PROGRESS."""
        call("ncclGroupStart")
        try:
            make_calls()
        except BaseException:
            # A started group must be ended, and its communicators then drop its calls. If the
            # communicators are freed, the group stays open in this thread.
            if self._failure is None:
                self._library.call("ncclGroupEnd")
            raise
        return call("ncclGroupEnd")

    def _settle(self, result: int) -> None:
        """Waits until NCCL has enqueued everything."""
        if result != IN_PROGRESS:
            return
        start, wait = monotonic(), _FIRST_POLL_SECONDS
        for replica_id in range(len(self._devices)):
            while self._state(replica_id) == IN_PROGRESS:
                now, operation = monotonic(), self._calling
                if operation is not None and now > operation.deadline:
                    where = f"replica {replica_id} ({self._devices[replica_id]})"
                    self._time_out(operation, f"{where} is still in progress")
                    raise _CallRefused
                if now - start < _SPIN_SECONDS:
                    sleep(0)  # releases the GIL
                else:
                    sleep(wait)
                    wait = min(2 * wait, _LAST_POLL_SECONDS)

    def _state(self, replica_id: int) -> int:
        """Returns SUCCESS or IN_PROGRESS.

        Raises:
            _CallRefused: an operation has failed.
        """
        handle = self._handles[replica_id]
        with self._mutex:
            self._call_locked("ncclCommGetAsyncError", handle, self._state_address)
            state = self._state_word.value
        if state not in (SUCCESS, IN_PROGRESS):
            what = self._library.explain(state)
            raise _CallRefused(f"replica {replica_id} came to {what}")
        return state

    def _call(self, function: str, *arguments: object) -> int:
        """Calls NCCL; returns SUCCESS or IN_PROGRESS.

        Raises:
            _CallRefused: NCCL returned an error, or the clique was aborted before or meanwhile.
        """
        with self._mutex:
            return self._call_locked(function, *arguments)

    def _call_locked(self, function: str, *arguments: object) -> int:
        """As ``_call``, in a thread that holds the mutex."""
        if self._failure is not None:
            raise _CallRefused
        result = self._library.functions[function](*arguments)
        if self._failure is not None:
            raise _CallRefused
        if result not in (SUCCESS, IN_PROGRESS):
            raise _CallRefused(f"{function} returned {self._library.explain(result)}")
        return result

    def _finish(self) -> None:
        if self._failure is None:
            with self._operation("ending its communicators") as operation:
                self._settle(self._group(self._finalize, self._call))
                self._destroy(operation)
        if not self._failure_was_raised:
            self._raise_failure()

    def _finalize(self) -> None:
        for replica_id in range(len(self._devices)):
            self._call("ncclCommFinalize", self._handles[replica_id])

    def _destroy(self, operation: Work) -> None:
        seconds = operation.deadline - monotonic()
        failed = self._end("ncclCommDestroy", seconds)
        if failed is None:
            self._time_out(operation, "ncclCommDestroy does not return")
            raise _CallRefused
        if failed:
            # ncclCommDestroy fails only before it starts, so these handles are still valid.
            self._end_each("ncclCommAbort", failed, _ABORT_SECONDS)
            raise _CallRefused(
                f"ncclCommDestroy returned {self._library.explain(failed.popitem()[1])}"
            )

    # - Ends and errors

    def _end(self, function: str, seconds: float) -> dict[int, int] | None:
        """Ends all communicators with a function of NCCL; see ``_end_each``."""
        handles, self._handles = self._handles, self._null_handles()
        return self._end_each(function, handles, seconds)

    def _end_each(
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

    def _watch(self) -> None:
        query_without_breaking_capture()
        while not self._stop.wait(_WATCH_SECONDS) and self._failure is None:
            calling = self._calling
            if calling is not None and monotonic() > calling.deadline + _HANG_SECONDS:
                self._time_out(calling, "a call does not return")
            elif self._in_flight and self._operation_lock.acquire(blocking=False):
                try:
                    self._check_devices()
                except (_CallRefused, RuntimeError) as error:  # CUDA raises the latter
                    self._abort_with(self._make_failure(self._in_flight[0].what, str(error)))
                finally:
                    self._operation_lock.release()
        if self._abandoned and not self._closed:
            try:
                self._finish()
            except MirrorError as error:
                _logger.warning("a strategy that was not closed: %s", error)

    def _check_devices(self) -> None:
        while self._in_flight:
            operation = self._in_flight[0]
            if not operation.is_done():
                for replica_id in range(len(self._devices)):
                    self._state(replica_id)
                if monotonic() > operation.deadline:
                    self._time_out(
                        operation, f"not done: {operation.late_replicas(self._devices)}"
                    )
                return
            self._in_flight.popleft()

    def _make_failure(self, what: str, why: str) -> MirrorError:
        where = ", ".join(map(str, self._devices))
        return BackendError(
            f"NCCL {version_name(self._library.version)} failed at {what} on {where}: {why}"
            f"{_hint(why)}; {_ABORTED}"
        )

    def _time_out(self, operation: Work, state: str) -> None:
        where = ", ".join(map(str, self._devices))
        self._abort_with(
            CollectiveTimeoutError(
                f"NCCL must be done within {operation.seconds:g} s; {operation.what} on {where} "
                f"was not: {state}; see what the devices were doing, or allow more with "
                f"timeout_seconds; {_ABORTED}"
            )
        )

    def _abort_with(self, failure: MirrorError) -> None:
        """Stores an error and aborts all communicators, unless another error came first."""
        locked = self._mutex.acquire(timeout=_HANG_SECONDS)
        try:
            if self._failure is None:
                self._failure = failure
                self._end("ncclCommAbort", _ABORT_SECONDS)
        finally:
            if locked:
                self._mutex.release()

    def _stop_watchdog(self) -> None:
        self._stop.set()
        self._watchdog.join()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            self._failure_was_raised = True
            raise type(self._failure)(str(self._failure)) from None


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


_ABORTED = (
    "its communicators were aborted, and what was reduced last may be garbage: make another "
    "strategy"
)

# GPUs that cannot access each other's memory exchange through shared memory: some 10 MB per pair
# and channel. Docker's default is 64 MB.
_SHARED_MEMORY, _ENOUGH_BYTES = "/dev/shm", 2**29
_SHORTAGE_WORDS = ("ncclSystemError", "shared memory", "/shm", "No space left")


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
