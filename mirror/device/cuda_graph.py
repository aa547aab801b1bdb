"""CUDA graphs: the work of one GPU, captured once and replayed by one call of the host.

A capture has a private memory pool only on the GPU where it began. So every GPU has its own
graphs. Other threads may use CUDA during a capture, for example to prefetch batches: the capture
mode is "thread_local".

[Note: Captures and launches]
What graphs of one GPU share, although each has memory of its own, decides how they are made:
- torch captures one graph at a time in a process. A backward pass over several GPUs runs in a
  thread for each, so captures take turns.
- The memory of a pool belongs to the stream it was allocated for, and cuBLAS has a workspace for
  each stream. So a GPU has one stream for captures. Streams of torch recur after 32: one that is
  used for captures only is in nobody else's hands.
- Kernels of all graphs write cuBLAS's workspace of that stream. Up to torch 2.12 they read the
  offset of random numbers at one address. So launches on different streams run one after the
  other: a stream first waits for the others on which graphs have been launched.
- cudaStreamEndCapture of an invalid capture raises, and torch then leaves the allocator and the
  generator in it: ``empty_cache`` and random numbers would fail. Both are told here.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from mirror.base.mutex import Mutex, release_if_owned
from mirror.base.torch_private import end_failed_capture

T = TypeVar("T")
Tensors = list[Tensor] | tuple[Tensor, ...]
_MODE = "thread_local"

_capturing = Mutex()


class DeviceGraph(Protocol):
    """Work of one device that can be repeated."""

    def capture(self, work: Callable[[], T]) -> T:
        """Calls ``work`` to capture what it enqueues, without running it; returns its result.

        Raises:
            Exception: the work cannot be captured; the partial capture is dropped.
        """

    def launch(self, into: Tensors = (), values: Tensors = ()) -> None:
        """Runs the work on the device's current stream, with the current memory contents.

        Args:
            into: tensors in graph memory, to which ``values`` are copied before.
        """


class _Gpu:
    """What the graphs of one GPU share. See [Note: Captures and launches].

    Attributes:
        stream: for captures.
        launched_on: the streams on which graphs have been launched.
        lock: held during a capture or a launch.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self.launched_on: list[Any] = []
        self._mutex = Mutex()
        self.lock = self._mutex.lock

    def order(self, stream: Any) -> None:
        """Has a stream wait for the launches on other streams."""
        for other in self.launched_on:
            if other != stream:
                stream.wait_stream(other)


_known_gpus: dict[torch.device, _Gpu] = {}


class GraphPool:
    """Memory that several graphs of one GPU share.

    A graph's memory that no tensor holds after its capture is given to later captures. So a launch
    overwrites it, and a launch of a later graph that of an earlier one. Another allocator than
    torch's own, as ``backend:cudaMallocAsync``, gives such memory back to CUDA.

    Attributes:
        keeps_memory: whether what no tensor holds stays the pool's.
    """

    keeps_memory = property(lambda self: torch.cuda.get_allocator_backend() == "native")

    def __init__(self) -> None:
        self._handle: Any = None
        self._graphs: weakref.WeakSet[CudaGraph] = weakref.WeakSet()

    @property
    def is_empty(self) -> bool:
        """Whether no graph uses it."""
        return not self._graphs

    def handle(self) -> Any:
        """Returns torch's handle; that of a pool without graphs cannot be used again."""
        if self.is_empty:
            self._handle = torch.cuda.graph_pool_handle()
        return self._handle

    def add(self, graph: CudaGraph) -> None:
        """Notes a graph that uses it."""
        self._graphs.add(graph)


class CudaGraph:
    """A ``torch.cuda.CUDAGraph`` of one GPU.

    Tensors that the work creates keep their memory while they are alive; each launch overwrites
    them.

    Args:
        pool: by default the graph has a pool of its own.
    """

    def __init__(self, device: torch.device, pool: GraphPool | None = None) -> None:
        self._device = device
        self._graph = torch.cuda.CUDAGraph()
        self._pool = GraphPool() if pool is None else pool
        if device not in _known_gpus:
            _known_gpus.setdefault(device, _Gpu(device))
        self._gpu = _known_gpus[device]

    def capture(self, work: Callable[[], T]) -> T:
        return _capturing.call(self._capture, work)

    def _capture(self, work: Callable[[], T]) -> T:
        # The pool's memory comes from CUDA: what uncompiled steps have left cached for each other
        # would be reserved beside it, and the two are of one size.
        torch.cuda.empty_cache()
        gpu, caller = self._gpu, torch.cuda.current_stream(self._device)
        stream = gpu.stream
        collects = gc.isenabled()
        try:
            gpu.lock.acquire()
            gpu.order(stream)
            stream.wait_stream(caller)
            gc.disable()  # freeing objects during a capture may invalidate it
            with torch.cuda.stream(stream):
                pool = self._pool.handle()
                self._graph.capture_begin(pool=pool, capture_error_mode=_MODE)
                try:
                    result = work()
                    self._graph.capture_end()
                except BaseException:
                    self._drop(pool)
                    raise
        finally:
            if collects:
                gc.enable()
            caller.wait_stream(stream)
            release_if_owned(gpu.lock)
        self._pool.add(self)
        return result

    def _drop(self, pool: Any) -> None:
        """Ends a capture that has failed, and leaves torch as it was before."""
        failed, self._graph = self._graph, torch.cuda.CUDAGraph()
        try:
            failed.capture_end()
        except RuntimeError:  # CUDA has refused something: the capture is invalid
            end_failed_capture(self._device, pool)
            with contextlib.suppress(RuntimeError):  # another capture frees the generator
                other = torch.cuda.CUDAGraph()
                pool = torch.cuda.graph_pool_handle()
                other.capture_begin(pool=pool, capture_error_mode=_MODE)
                torch.zeros(1, device=self._device)  # torch warns of an empty graph
                other.capture_end()

    def launch(self, into: Tensors = (), values: Tensors = ()) -> None:
        gpu, stream = self._gpu, torch.cuda.current_stream(self._device)
        try:
            with gpu.lock:  # in a ``with`` statement: calls count here, see ``base/mutex.py``
                if gpu.launched_on != [stream]:
                    gpu.order(stream)
                    if stream not in gpu.launched_on:
                        gpu.launched_on.append(stream)
                if into:
                    torch._foreach_copy_(into, values, non_blocking=True)
                self._graph.replay()
        except BaseException:
            release_if_owned(gpu.lock)
            raise


def is_capturing() -> bool:
    """Whether the work of this thread is being captured, on the current GPU."""
    return torch.cuda.is_current_stream_capturing()


def has_graphs(device: torch.device) -> bool:
    """Whether a device supports graphs; the CPU runs its work immediately."""
    return device.type == "cuda"
