"""CUDA graphs: the work of one GPU, captured once and replayed by one call of the host.

A capture has a private memory pool only on the GPU where it began. So every GPU has its own
graphs, which are captured one after the other, each with its own pool and on its own stream. Other
threads may use CUDA during a capture, for example to prefetch batches: the capture mode is
"thread_local".
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import Protocol, TypeVar

import torch

T = TypeVar("T")


class DeviceGraph(Protocol):
    """Work of one device that can be repeated."""

    def capture(self, work: Callable[[], T]) -> T:
        """Calls ``work`` to capture what it enqueues, without running it; returns its result.

        Raises:
            Exception: the work cannot be captured; the partial capture is dropped.
        """

    def launch(self) -> None:
        """Runs the work on the device's current stream, with the current memory contents."""


class CudaGraph:
    """A ``torch.cuda.CUDAGraph`` of one GPU.

    Tensors that the work creates keep their memory while they are alive; each launch overwrites
    them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graph = torch.cuda.CUDAGraph()

    def capture(self, work: Callable[[], T]) -> T:
        if torch.backends.cuda.is_built():
            # The pool's memory comes from CUDA: what uncompiled steps have left cached for each
            # other would be reserved beside it, and the two are of one size.
            torch.cuda.empty_cache()
        stream = torch.cuda.Stream(self._device)
        caller = torch.cuda.current_stream(self._device)
        stream.wait_stream(caller)
        collects = gc.isenabled()
        try:
            gc.disable()  # freeing objects during a capture may invalidate it
            with torch.cuda.stream(stream):
                pool = torch.cuda.graph_pool_handle()
                self._graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    result = work()
                except BaseException:
                    with contextlib.suppress(RuntimeError):
                        self._graph.capture_end()
                    self._graph = torch.cuda.CUDAGraph()
                    raise
                self._graph.capture_end()
        finally:
            if collects:
                gc.enable()
            caller.wait_stream(stream)
        return result

    def launch(self) -> None:
        self._graph.replay()


def has_graphs(device: torch.device) -> bool:
    """Whether a device supports graphs; the CPU runs its work immediately."""
    return device.type == "cuda"
