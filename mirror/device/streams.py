"""CUDA streams and events: the current streams, which threads pass on, and side streams.

The current stream of a GPU is thread-local. Work that one thread enqueues and another thread uses
is in order only if both use the same stream. So replicas' threads start with the caller's streams:
``with torch.cuda.stream(s): strategy.run(...)`` reads data that was enqueued on ``s``. At a merge
one thread uses the data of all replicas, on the stream that each replica had when it arrived.

Side streams carry reductions, and batches on their way to a GPU. Simulated devices have no
streams: there the same classes run the work in the calling thread, or in a thread beside it.

Events order the work of streams, and measure it on devices; none of them makes the host wait.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from queue import SimpleQueue
from time import perf_counter
from typing import Any, Protocol

import torch

from mirror.devices import is_simulated

# CUresult and CUstreamCaptureMode of cuda.h.
_SUCCESS, _NOT_READY, _RELAXED = 0, 600, 2
_CAPTURE_ERRORS = range(900, 910)


class Event(Protocol):
    """A point in the work of a device."""

    def query(self) -> bool:
        """Whether the device has reached this point; does not wait."""


class _Past:
    def query(self) -> bool:
        return True


_PAST = _Past()


class _CudaEvent:
    """A torch event, queried through the driver, because torch holds the GIL during a query.

    The driver may wait for a lock of a thread that waits for the GIL: that would be a deadlock.
    """

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def query(self) -> bool:
        driver = _driver()
        if driver is None:
            return bool(self._event.query())
        status = driver.cuEventQuery(ctypes.c_void_p(self._event.cuda_event))
        if status not in (_SUCCESS, _NOT_READY):
            raise RuntimeError(f"CUDA error {status} of work that had been enqueued")
        return bool(status == _SUCCESS)


def record_event(device: torch.device) -> Event:
    """Returns an event at the end of the device's current stream; on the CPU it is in the past."""
    if device.type != "cuda":
        return _PAST
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return _CudaEvent(event)


def query_without_breaking_capture() -> None:
    """Allows the calling thread to query events while other threads capture a CUDA graph.

    For threads that only watch: the events they query are never captured.
    """
    driver = _driver()
    if driver is not None:
        driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(_RELAXED)))


def stream_address(device: torch.device) -> int:
    """Returns the address of the device's current stream for C libraries; 0 for the CPU.

    CUDA's default stream is 0, too, so the result does not show whether there is a stream.
    """
    if device.type != "cuda":
        return 0
    return torch.cuda.current_stream(device.index).cuda_stream  # by its number it is quicker


def is_stream_idle(device: torch.device, stream: int) -> bool:
    """Whether a stream, given by its address, has certainly finished its work; never waits.

    False for the CPU. Not for streams that may be captured: the query would end the capture.
    """
    driver = _driver()
    if device.type != "cuda" or driver is None:
        return False
    with torch.cuda.device(device):  # 0 is the default stream of the current one
        return bool(driver.cuStreamQuery(ctypes.c_void_p(stream)) == _SUCCESS)


def has_failed(device: torch.device) -> bool:
    """Whether a GPU can no longer be used in this process; never waits. False for the CPU.

    After a failed assertion, an illegal address or an uncorrectable ECC error, every call of CUDA
    for that GPU returns this error. Other errors, such as too little memory, pass.
    """
    driver = _driver()
    if device.type != "cuda" or driver is None:
        return False
    try:
        with torch.cuda.device(device):
            status = driver.cuStreamQuery(ctypes.c_void_p(0))
    except RuntimeError:  # the device cannot be made the current one
        return True
    # A stream that is captured may not be queried, whatever the state of the GPU.
    return status not in (_SUCCESS, _NOT_READY, *_CAPTURE_ERRORS)


@cache
def _driver() -> ctypes.CDLL | None:
    """Returns CUDA's driver library; ctypes releases the GIL during its calls."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


class Stopwatch:
    """Sums how long a device works between ``start`` and ``stop``, without waiting for it.

    On a GPU it uses events on the calling thread's current stream and counts only finished work;
    on the CPU it uses the clock.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._started: Any = None
        self._pending: deque[tuple[Any, Any]] = deque()
        self._seconds = 0.0

    def start(self) -> None:
        """Begins an interval."""
        self._started = self._read_clock()

    def stop(self) -> None:
        """Ends the interval, if one has begun."""
        started, self._started = self._started, None
        if started is not None:
            self._pending.append((started, self._read_clock()))

    def seconds(self) -> float:
        """Returns the sum of the intervals that are over."""
        while self._pending:
            start, stop = self._pending[0]
            if self._device.type != "cuda":
                self._seconds += stop - start
            elif stop.query():
                self._seconds += start.elapsed_time(stop) / 1000
            else:
                break
            self._pending.popleft()
        return self._seconds

    def _read_clock(self) -> Any:
        if self._device.type != "cuda":
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


class CallerStreams:
    """The current streams of some GPUs in the thread that creates this object."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        gpus = dict.fromkeys(devices)
        self._streams = {gpu: torch.cuda.current_stream(gpu) for gpu in gpus}
        # New threads start with the default streams.
        self._unusual = {
            gpu: stream
            for gpu, stream in self._streams.items()
            if stream != torch.cuda.default_stream(gpu)
        }

    @contextmanager
    def entering(self, device: torch.device) -> Iterator[None]:
        """Makes these streams and ``device`` current in this thread; restores both at the end."""
        with ExitStack() as stack:
            for gpu, stream in self._unusual.items():
                if gpu != device:
                    stack.enter_context(torch.cuda.stream(stream))
            # Also for a default stream: a replica may set another one without a context.
            stack.enter_context(torch.cuda.stream(self._streams[device]))
            yield


class ReplicaStreams:
    """The streams on which replicas have enqueued their data for a merge.

    Args:
        rows: the GPUs of each replica.

    Attributes:
        are_mixed: whether a replica has ever used several streams of one GPU for one merge.
    """

    def __init__(self, rows: Sequence[Sequence[torch.device]]) -> None:
        self._rows = tuple(rows)
        self.are_mixed = False
        self._noted: dict[torch.device, dict[Any, None]] = {}
        self._have_noted: set[tuple[int, torch.device]] = set()
        self._used: dict[tuple[int, torch.device], set[Any]] = {}
        self._ever_used: dict[torch.device, set[Any]] = {}

    def record_use(self, replica_id: int, device: torch.device) -> None:
        """Records that the current stream has made a tensor for a merge.

        It may not be the one that ``record`` finds: a forward pass, and so its backward pass, may
        use streams of its own.
        """
        stream = torch.cuda.current_stream(device)
        self._ever_used.setdefault(device, set()).add(stream)
        used = self._used.setdefault((replica_id, device), set())
        used.add(stream)
        self.are_mixed |= len(used) > 1

    def wait_for_used(self) -> None:
        """Makes the current streams wait for those that have made tensors for a merge."""
        for (_, device), used in self._used.items():
            current = torch.cuda.current_stream(device)
            for stream in used:
                if stream != current:
                    current.wait_stream(stream)

    def record(self, replica_id: int, device: torch.device | None = None) -> None:
        """Records the current streams of the calling replica, on all its devices or on one."""
        for gpu in self._rows[replica_id] if device is None else (device,):
            stream = torch.cuda.current_stream(gpu)
            self._noted.setdefault(gpu, {})[stream] = None
            self._have_noted.add((replica_id, gpu))
            self._ever_used.setdefault(gpu, set()).add(stream)

    def are_complete(self, position: Sequence[torch.device]) -> bool:
        """Whether all replicas have recorded their streams on their devices at a position."""
        return self._have_noted.issuperset(enumerate(position))

    def keep(self, read: Sequence[Sequence[Any]], made: Sequence[Sequence[Any]]) -> None:
        """Keeps the allocator from reusing tensors' memory while streams still need it.

        Args:
            read: per replica, tensors that this thread's streams read and the caller drops.
            made: per replica, tensors from this thread's streams, for the recorded streams.

        All are on the replicas' first devices. Memory that only the current stream has ever made
        and read needs no call: the allocator gives it to that stream again.
        """
        for (device, *_), inputs, outputs in zip(self._rows, read, made, strict=True):
            stream = torch.cuda.current_stream(device)
            if self._ever_used.get(device) != {stream}:
                for tensor in inputs:
                    tensor.record_stream(stream)
            for noted in self._noted.get(device, ()):
                if noted != stream:
                    for tensor in outputs:
                        tensor.record_stream(noted)

    def forget(self) -> None:
        """Drops the recorded streams, but for what ``keep`` knows of earlier ones."""
        self._noted, self._have_noted, self._used = {}, set(), {}

    @contextmanager
    def make_caller_wait(self) -> Iterator[None]:
        """Makes one recorded stream per GPU current in this thread, ordered with the others.

        Work enqueued inside runs after the work that is enqueued on all of them, and before their
        later work.
        """
        with ExitStack() as stack:
            others: list[tuple[Any, Any]] = []
            for device, noted in tuple(self._noted.items()):
                current = torch.cuda.current_stream(device)
                chosen, *rest = (current, *noted) if current in noted else tuple(noted)
                if chosen != current:
                    stack.enter_context(torch.cuda.stream(chosen))
                others += [(chosen, stream) for stream in rest if stream != chosen]
            for chosen, stream in others:
                chosen.wait_stream(stream)
            try:
                yield
            finally:
                for chosen, stream in others:
                    stream.wait_stream(chosen)


class SideStream:
    """Runs work beside the computation: on side streams, or in a thread.

    Args:
        devices: the devices of the work. Each GPU gets a side stream for it; on CPU devices a
            thread runs it.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = tuple(dict.fromkeys(devices))
        self._streams: list[torch.cuda.Stream] = []
        self._thread = SerialExecutor()
        self._is_closed = False

    def start(self, work: Callable[[], None]) -> Callable[[], None]:
        """Starts work after all enqueued work; returns a function that waits for it.

        On GPUs that function makes the calling thread's current streams wait, not the host. The
        caller keeps the outputs alive until then. Work runs in the order in which it is started.
        """
        if self._is_closed:
            work()
            return lambda: None
        if is_simulated(self._devices):
            return self._thread.start(work)
        if not self._streams:
            # Else a reduction waits until the computation has no more work for the whole GPU.
            self._streams = [torch.cuda.Stream(device, priority=-1) for device in self._devices]
        with ExitStack() as stack:
            for device, stream in zip(self._devices, self._streams, strict=True):
                stream.wait_stream(torch.cuda.current_stream(device))
            for stream in self._streams:
                stack.enter_context(torch.cuda.stream(stream))
            work()
        events = [stream.record_event() for stream in self._streams]

        def wait() -> None:
            for device, event in zip(self._devices, events, strict=True):
                torch.cuda.current_stream(device).wait_event(event)

        return wait

    def close(self) -> None:
        """Ends the thread, if there is one; later work runs in the caller's thread. Idempotent."""
        self._is_closed = True
        self._thread.close()


class CopyStreams:
    """Side streams, one per GPU, on which batches travel while the replicas compute.

    CPU devices have none: there a copy is the tensor itself, and nothing has to be waited for.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._streams: dict[torch.device, Any] = {
            device: torch.cuda.Stream(device)
            for device in dict.fromkeys(devices)
            if device.type == "cuda"
        }

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a pinned copy of a host tensor, from which copies to GPUs are asynchronous.

        One copy serves all parts, because pinning costs the host more than copying. Returns the
        tensor itself if it is pinned, on a GPU, or for simulated devices; also if it requires a
        gradient, because then the copies are part of the graph.
        """
        on_host = tensor.device.type == "cpu" and tensor.layout is torch.strided
        if not self._streams or not on_host or tensor.requires_grad or tensor.is_pinned():
            return tensor
        # Pinned memory has the strides of the original, and cannot be written to where its
        # elements overlap, as after expand.
        return (tensor.contiguous() if 0 in tensor.stride() else tensor).pin_memory()

    def deliver(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Returns the tensor on the device, for what the calling thread enqueues from now on."""
        part = self.copy(tensor, device)
        stream = self._streams.get(device)
        if stream is not None:
            consumer = torch.cuda.current_stream(device)
            consumer.wait_stream(stream)
            part.record_stream(consumer)
        return part

    def copy(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Returns the tensor on the device; for a GPU through pinned memory, without waiting.

        The copy may be used after ``receive`` has waited for the events of ``record_events``.
        ``tensor`` may be freed at once: the allocators keep pinned memory until the copies from it
        are done.
        """
        stream = self._streams.get(device)
        if stream is None:
            return tensor.to(device)
        if tensor.device.type == "cuda":
            stream.wait_stream(torch.cuda.current_stream(tensor.device))
        else:
            tensor = self.pin(tensor)
        with torch.cuda.stream(stream):
            return tensor.to(device, non_blocking=True)

    def synchronize(self) -> None:
        """Blocks the host until the copies enqueued so far are done."""
        for event in self.record_events():
            event.synchronize()

    def record_events(self) -> tuple[Any, ...]:
        """Returns events that happen when the copies enqueued so far are done, one per GPU."""
        return tuple(stream.record_event() for stream in self._streams.values())

    def receive(self, events: Sequence[Any], tensors: Iterable[torch.Tensor]) -> None:
        """Makes the streams of computation wait for the events, and keeps the tensors for them.

        Those are the calling thread's current stream of each GPU, on which the replicas compute,
        too. The host does not wait.
        """
        consumers = {device: torch.cuda.current_stream(device) for device in self._streams}
        for device, event in zip(self._streams, events, strict=True):
            consumers[device].wait_event(event)
        if not consumers:
            return
        for tensor in tensors:
            if tensor.device in consumers:
                # Its memory must not be used again while work enqueued there reads it.
                tensor.record_stream(consumers[tensor.device])


_POLL_SECONDS = 0.1  # how often a waiting thread checks that the executor's thread is alive
_GONE = "mirror's side thread is gone"


class _Job:
    """A job and its error.

    Attributes:
        done: locked until the job is done.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        self.work = work
        self.error: BaseException | None = None
        self.done = threading.Lock()
        self.done.acquire()


class SerialExecutor:
    """One thread, started when first needed; it ends with this object.

    An interrupt in any thread never makes another one wait forever. An executor of
    concurrent.futures has locks that an interrupt may leave locked.
    """

    def __init__(self) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._thread_error: list[BaseException] = []
        weakref.finalize(self, self._jobs.put, None)

    def start(self, work: Callable[[], None]) -> Callable[[], None]:
        """Enqueues work after all earlier work; returns a function that waits for it."""
        thread = self._thread
        if thread is None or not thread.is_alive():  # interrupted, or lost in a fork
            self._jobs.put(None)  # after an interrupt, is_alive() may be wrong: end that thread
            self._jobs, self._thread_error = SimpleQueue(), []
            weakref.finalize(self, self._jobs.put, None)
            thread = threading.Thread(
                target=_do, args=(self._jobs, self._thread_error), name="mirror side", daemon=True
            )
            self._thread = thread
            thread.start()
        job, thread_error = _Job(work), self._thread_error
        self._jobs.put(job)

        def wait() -> None:
            while not job.done.acquire(timeout=_POLL_SECONDS):
                if not thread.is_alive() and not job.done.acquire(timeout=0):
                    raise thread_error[0] if thread_error else RuntimeError(_GONE)
            if job.error is not None:
                raise job.error

        return wait

    def close(self) -> None:
        """Ends the thread when its work is done, and waits for that; idempotent."""
        thread, self._thread = self._thread, None
        self._jobs.put(None)
        if thread is not None and thread.is_alive():
            thread.join()


def _do(jobs: SimpleQueue[_Job | None], thread_error: list[BaseException]) -> None:
    """Runs all jobs; ``thread_error`` gets an exception that hits this thread between jobs."""
    try:
        while (job := jobs.get()) is not None:
            try:
                job.work()
            except BaseException as error:
                job.error = error
            finally:
                job.done.release()
                del job  # so that its references end before the next job comes
    except BaseException as error:
        thread_error.append(error)
