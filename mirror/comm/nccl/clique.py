"""The clique: NCCL's communicators in this process, one per device, called and ended together.

[Note: An end to every wait]
NCCL has no time-out: a kernel whose peer does not come spins until its communicator is aborted.
The communicators are non-blocking, so a call that has to wait says "in progress" and the caller
asks again, up to the deadline of the operation. A thread watches the enqueued work: it queries the
events behind it and NCCL's asynchronous errors. A thread that finds an error stores it and aborts
*all* communicators, which ends their kernels. The watching thread cannot raise, so the next call
raises its error. An aborted collective leaves garbage in its outputs, on every device.

An aborted communicator is freed, so no call to it may follow: ``_mutex`` is held for each single
call, or for the calls of one collective, and the note is looked at under it. A call that itself
does not return (non-blocking ones should) keeps the mutex; then the watching thread aborts without
it, which makes NCCL return.

[Note: What a wait costs]
NCCL enqueues what a group has in a thread that it starts for that, in some 10 us, and nothing may
follow on the streams before. To sleep takes three times as long at least, so the caller asks again
at once for the first 200 us, and lets other threads run in between.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic, sleep

import torch

from mirror.comm.nccl.calls import Call, are_joint
from mirror.comm.nccl.communicators import (
    Communicators,
    RankRange,
    Work,
    failure_message,
    timeout_message,
)
from mirror.comm.nccl.libnccl import IN_PROGRESS, SUCCESS, NcclLibrary
from mirror.device.events import query_without_breaking_capture, record_event, stream_address
from mirror.errors import MirrorError

_WATCH_SECONDS = 0.05
# Between two questions for the state of what is in progress, after it was asked without a pause.
_SPIN_SECONDS, _FIRST_POLL_SECONDS, _LAST_POLL_SECONDS = 200e-6, 20e-6, 5e-3
# After its deadline, until a call counts as one that does not return.
_HANG_SECONDS = 0.2
# An abort that takes longer goes on in the background.
_ABORT_SECONDS = 0.3

_logger = logging.getLogger("mirror")


class _CallRefused(Exception):
    """A call to NCCL, or what it had started, failed; or the clique has been given up."""


class Clique:
    """One communicator per replica; in one process, replica ``i`` is rank ``i``.

    Any thread may call it; one operation goes on at a time. Two cliques over the same GPUs must
    not be called from two threads at once: their kernels may wait for each other.
    """

    def __init__(
        self,
        library: NcclLibrary,
        devices: Sequence[torch.device],
        timeout_seconds: float,
        init_seconds: float,
        place: RankRange | None = None,
    ) -> None:
        """Makes the communicators.

        Args:
            timeout_seconds: what an operation may take.
            init_seconds: what making them may take.
            place: of these devices among the ranks of several processes.

        Raises:
            BackendError: NCCL refuses.
            CollectiveTimeoutError: it did not come to an end.
        """
        self._library = library
        self._devices = tuple(devices)
        self.timeout_seconds = timeout_seconds
        self._communicators = Communicators(library, self._devices, place)
        self._state_word = ctypes.c_int(SUCCESS)  # used only by the owner of the mutex
        self._state_address = ctypes.byref(self._state_word)
        self._turn = threading.Lock()
        self._mutex = threading.Lock()
        self._failure: MirrorError | None = None
        self._failure_was_raised = False
        self._closed = False
        self._abandoned = False
        self._calling: Work | None = None
        self._under_way: deque[Work] = deque()
        self._stop = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="mirror-nccl", daemon=True)
        self._watcher.start()
        try:
            with self._operation("making its communicators", init_seconds):
                self._make()
        except BaseException:
            self._closed = True
            self._end_watching()
            # Those that a call left behind that came back only when the others were aborted.
            self._communicators.end("ncclCommAbort", _ABORT_SECONDS)
            raise

    def run(self, what: str, calls: Sequence[Call]) -> None:
        """Enqueues the calls on each device's current stream, as one group.

        Raises:
            BackendError: NCCL refuses, or something failed behind an earlier call.
            CollectiveTimeoutError: this did not come to an end, or an earlier call did not.
        """
        with self._operation(what) as operation:
            streams = operation.streams = [stream_address(device) for device in self._devices]
            handles = self._communicators.handles

            def enqueue() -> None:
                for replica_id, function, arguments in calls:
                    self._locked_call(
                        function, *arguments, handles[replica_id], streams[replica_id]
                    )

            with self._mutex:
                result = self._group(enqueue, self._locked_call)
            self._settle(result)
            num_replicas = len(self._devices)
            # See [Note: One witness].
            first = num_replicas - 1 if are_joint(calls, num_replicas) else 0
            operation.events = [record_event(device) for device in self._devices[first:]]
            if not operation.is_done():
                self._under_way.append(operation)

    def close(self) -> None:
        """Waits for what is under way and ends the communicators; closing again does nothing.

        Raises:
            BackendError, CollectiveTimeoutError: that failed, or something failed behind an
                earlier call, and nobody has been told yet.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self._finish()
        finally:
            self._end_watching()

    def check(self) -> None:
        """Raises what has gone wrong, if anything has."""
        self._raise_failure()

    def is_idle(self) -> bool:
        """Whether all that was enqueued is done, or has failed."""
        return not self._under_way or self._failure is not None

    def abort(self, *, is_told: bool = False) -> None:
        """Aborts the clique from any thread; with ``is_told``, ``close`` does not report it."""
        at = [operation.what for operation in (self._calling, *self._under_way) if operation]
        self._give_up(self._failed(", ".join(at[:1]) or "rest", "it was told to abort"))
        self._failure_was_raised |= is_told

    def abandon(self) -> None:
        """Has the watching thread close it: for finalizers, which run in any thread."""
        self._abandoned = True
        self._stop.set()

    # What the caller's thread does.

    @contextmanager
    def _operation(self, what: str, seconds: float | None = None) -> Iterator[Work]:
        """Gives the caller its turn; any error in it aborts the clique."""
        with self._turn:
            self._raise_failure()
            seconds = self.timeout_seconds if seconds is None else seconds
            operation = Work(what, seconds, monotonic() + seconds)
            self._calling = operation
            try:
                yield operation
            except _CallRefused as refused:
                self._give_up(self._failed(what, str(refused)))
                self._raise_failure()
            except BaseException as error:
                # Ctrl-C, for instance: it is unknown what has been enqueued on which device.
                self._give_up(self._failed(what, f"a {type(error).__name__} broke it off"))
                self._failure_was_raised = True
                raise
            finally:
                self._calling = None

    def _make(self) -> None:
        ranks = self._communicators.identified(self._call)
        self._settle(self._group(lambda: self._communicators.make(ranks, self._call), self._call))

    def _group(self, make_calls: Callable[[], None], call: Callable[[str], int]) -> int:
        """Makes the calls as one; returns what comes of them: SUCCESS or IN_PROGRESS."""
        call("ncclGroupStart")
        try:
            make_calls()
        except BaseException:
            # A group that was begun has to be ended; its communicators then forget what was in
            # it. Not if they are gone: the group stays open, in this thread.
            if self._failure is None:
                self._library.call("ncclGroupEnd")
            raise
        return call("ncclGroupEnd")

    def _settle(self, result: int) -> None:
        """Waits until NCCL has enqueued everything. See [Note: What a wait costs]."""
        if result != IN_PROGRESS:
            return
        begun, wait = monotonic(), _FIRST_POLL_SECONDS
        for replica_id in range(len(self._devices)):
            while self._state(replica_id) == IN_PROGRESS:
                now, operation = monotonic(), self._calling
                if operation is not None and now > operation.deadline:
                    where = f"replica {replica_id} ({self._devices[replica_id]})"
                    self._time_out(operation, f"{where} is still in progress")
                    raise _CallRefused
                if now - begun < _SPIN_SECONDS:
                    sleep(0)  # lets go of the GIL
                else:
                    sleep(wait)
                    wait = min(2 * wait, _LAST_POLL_SECONDS)

    def _state(self, replica_id: int) -> int:
        """Returns SUCCESS or IN_PROGRESS.

        Raises:
            _Refused: what was started has failed.
        """
        handle = self._communicators.handles[replica_id]
        with self._mutex:
            self._locked_call("ncclCommGetAsyncError", handle, self._state_address)
            state = self._state_word.value
        if state not in (SUCCESS, IN_PROGRESS):
            what = self._library.explain(state)
            raise _CallRefused(f"replica {replica_id} came to {what}")
        return state

    def _call(self, function: str, *arguments: object) -> int:
        """Calls NCCL; returns SUCCESS or IN_PROGRESS.

        Raises:
            _Refused: NCCL returned an error, or the clique has been given up, also meanwhile.
        """
        with self._mutex:
            return self._locked_call(function, *arguments)

    def _locked_call(self, function: str, *arguments: object) -> int:
        """Does the same in a thread that holds the mutex."""
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
            self._call("ncclCommFinalize", self._communicators.handles[replica_id])

    def _destroy(self, operation: Work) -> None:
        seconds = operation.deadline - monotonic()
        failure_message = self._communicators.end("ncclCommDestroy", seconds)
        if failure_message is None:
            self._time_out(operation, "ncclCommDestroy does not return")
            raise _CallRefused
        if failure_message:
            # It does not fail once it has begun, so these still are there.
            self._communicators.end_each("ncclCommAbort", failure_message, _ABORT_SECONDS)
            raise _CallRefused(
                f"ncclCommDestroy returned {self._library.explain(failure_message.popitem()[1])}"
            )

    # What ends it.

    def _watch(self) -> None:
        query_without_breaking_capture()
        while not self._stop.wait(_WATCH_SECONDS) and self._failure is None:
            calling = self._calling
            if calling is not None and monotonic() > calling.deadline + _HANG_SECONDS:
                self._time_out(calling, "a call does not return")
            elif self._under_way and self._turn.acquire(blocking=False):
                try:
                    self._look_at_devices()
                except (_CallRefused, RuntimeError) as error:  # the latter is what CUDA has to say
                    self._give_up(self._failed(self._under_way[0].what, str(error)))
                finally:
                    self._turn.release()
        if self._abandoned and not self._closed:
            try:
                self._finish()
            except MirrorError as error:
                _logger.warning("a strategy that was not closed: %s", error)

    def _look_at_devices(self) -> None:
        while self._under_way:
            operation = self._under_way[0]
            if not operation.is_done():
                for replica_id in range(len(self._devices)):
                    self._state(replica_id)
                if monotonic() > operation.deadline:
                    self._time_out(
                        operation, f"not done: {operation.timeout_message(self._devices)}"
                    )
                return
            self._under_way.popleft()

    def _failed(self, what: str, why: str) -> MirrorError:
        return failure_message(self._library.version, what, self._devices, why)

    def _time_out(self, operation: Work, state: str) -> None:
        self._give_up(timeout_message(operation.seconds, operation.what, self._devices, state))

    def _give_up(self, failure: MirrorError) -> None:
        """Notes the failure and aborts all communicators; only the first one to come does."""
        locked = self._mutex.acquire(timeout=_HANG_SECONDS)
        try:
            if self._failure is None:
                self._failure = failure
                self._communicators.end("ncclCommAbort", _ABORT_SECONDS)
        finally:
            if locked:
                self._mutex.release()

    def _end_watching(self) -> None:
        self._stop.set()
        self._watcher.join()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            self._failure_was_raised = True
            raise type(self._failure)(str(self._failure)) from None
