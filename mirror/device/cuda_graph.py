"""CUDA graphs: work of one GPU, recorded once, and launched again by one call of the host.

[Note: One graph, one GPU]
A capture gives memory of its own to the GPU that it began on, and to no other; so every GPU has
its own graphs, one captured after the other, each with its own pool and on a stream of its own.
While one is captured, other threads go on with CUDA (batches are read ahead): what they do spoils
nothing ("thread_local").
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import Protocol, TypeVar

import torch

T = TypeVar("T")


class DeviceGraph(Protocol):
    """Work of one device that can be done again."""

    def capture(self, work: Callable[[], T]) -> T:
        """Calls ``work``, which enqueues; returns what it returns. Nothing is done by that.

        Raises:
            Exception: it does what cannot be captured; nothing of it is left.
        """

    def launch(self) -> None:
        """Does the work, on the device's current stream, with what lies in the same memory now."""


class CudaGraph:
    """A ``torch.cuda.CUDAGraph`` of one GPU. See [Note: One graph, one GPU].

    What the work has made stays where it is for as long as there are tensors of it, and is written
    anew by every launch.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graph = torch.cuda.CUDAGraph()

    def capture(self, work: Callable[[], T]) -> T:
        stream = torch.cuda.Stream(self._device)
        caller = torch.cuda.current_stream(self._device)
        stream.wait_stream(caller)
        collects = gc.isenabled()
        gc.disable()  # what it would free in the middle of a capture may spoil it
        try:
            with torch.cuda.stream(stream):
                pool = torch.cuda.graph_pool_handle()
                self._graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    result = work()
                except BaseException:
                    self._abandon()
                    raise
                self._graph.capture_end()
        finally:
            if collects:
                gc.enable()
            caller.wait_stream(stream)
        return result

    def launch(self) -> None:
        self._graph.replay()

    def _abandon(self) -> None:
        """Ends a capture that has failed."""
        with contextlib.suppress(RuntimeError):  # what made it fail is raised
            self._graph.capture_end()
        self._graph = torch.cuda.CUDAGraph()


def has_graphs(device: torch.device) -> bool:
    """Whether a device has graphs; the CPU does its work at once."""
    return device.type == "cuda"
