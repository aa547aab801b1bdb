"""The parts of ``torch.cuda`` that handle streams, one class each, for simulated GPUs."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from time import perf_counter

import torch

from tests.gpu.order import Agent, Order
from tests.gpu.stalls import Stalls


class Streams:
    """The streams of simulated GPUs, and which are current in each thread.

    A GPU is as slow as it may be: nothing is done before the host has waited for it, but a second
    question whether something is done is answered with yes.

    Attributes:
        everywhere: all streams, by device and address.
        stalls: of replicas whose thread waits for a GPU.
    """

    def __init__(self, num_devices: int, order: Order) -> None:
        self.num_devices, self.order = num_devices, order
        self.lock = threading.RLock()
        self.everywhere: dict[tuple[int, int], FakeStream] = {}
        self._in_thread = threading.local()
        self.capturing: FakeStream | None = None
        self.stalls = Stalls()
        for index in range(num_devices):
            FakeStream(self, index, "the default stream", address=0)

    def index_of(self, device=None) -> int:
        """Returns the number of a device, given in any of torch's ways; by default the current."""
        if isinstance(device, str):
            device = torch.device(device)
        if isinstance(device, torch.device):
            assert device.type == "cuda", f"{device} has no streams"
            device = device.index
        index = self.current_device() if device is None else int(device)
        if not 0 <= index < self.num_devices:
            raise RuntimeError(f"CUDA error: invalid device ordinal ({index})")
        return index

    def current_device(self) -> int:
        return getattr(self._in_thread, "device", 0)

    def set_device(self, device) -> None:
        self._in_thread.device = self.index_of(device)

    def default_stream(self, device=None) -> FakeStream:
        return self.everywhere[self.index_of(device), 0]

    def current_stream(self, device=None) -> FakeStream:
        index = self.index_of(device)
        return self._mine().get(index) or self.everywhere[index, 0]

    def set_stream(self, stream: FakeStream) -> None:
        """Makes a stream current in this thread, and so its device."""
        self._mine()[stream.device.index] = stream
        self.set_device(stream.device)

    @contextmanager
    def using_device(self, device):
        before = self.current_device()
        self.set_device(device)
        try:
            yield
        finally:
            self.set_device(before)

    @contextmanager
    def using_stream(self, stream: FakeStream | None):
        if stream is None:
            yield
            return
        device, before = self.current_device(), self.current_stream(stream.device)
        self.set_stream(stream)
        try:
            yield
        finally:
            self.set_stream(before)
            self.set_device(device)

    @contextmanager
    def capture(self, stream: FakeStream):
        """A capture in torch's default mode, which any thread's synchronization spoils."""
        self.capturing = stream
        try:
            with self.using_stream(stream):
                yield
        finally:
            self.capturing = None

    def is_capturing(self) -> bool:
        return self.capturing is not None and self.capturing == self.current_stream()

    def may_spoil(self, what: str) -> None:
        """Notes what CUDA refuses while a capture is under way, and the capture with it."""
        if self.capturing is not None:
            self.order.violations.append(f"{what} spoils the capture on {self.capturing}")

    def wait(self, clock: dict[Agent, int], what: str) -> bool:
        """Has the host wait until all that a clock says is done; returns whether that stalls.

        The caller calls ``stalls.stall`` where it holds no lock.
        """
        self.may_spoil(what)
        with self.lock:
            is_done = self.order.host.knows(clock)
            self.order.host.learn(clock)
        return not is_done

    def synchronize(self, device=None) -> None:
        """Has the host wait for a device."""
        index, is_stalled = self.index_of(device), False
        for (its, _), stream in tuple(self.everywhere.items()):
            if its == index:
                clock = stream.agent.snapshot()
                is_stalled |= self.wait(clock, "torch.cuda.synchronize()")
        if is_stalled:
            self.stalls.stall()

    def _mine(self) -> dict[int, FakeStream]:
        if not hasattr(self._in_thread, "streams"):
            self._in_thread.streams = {}
        mine: dict[int, FakeStream] = self._in_thread.streams
        return mine


class FakeStream:
    """What ``torch.cuda.Stream`` makes."""

    def __init__(self, streams: Streams, device, name: str = "", address: int | None = None):
        self._streams = streams
        index = streams.index_of(device)
        with streams.lock:
            self.device = torch.device("cuda", index)
            number = sum(its == index for its, _ in streams.everywhere)
            self.cuda_stream = 1000 * number if address is None else address
            self.agent = Agent(f"{name or f'stream {number}'} of {self.device}")
            streams.everywhere[index, self.cuda_stream] = self

    def wait_event(self, event: FakeEvent) -> None:
        with self._streams.lock:
            self.agent.learn(event.clock or {})

    def wait_stream(self, stream: FakeStream) -> None:
        with self._streams.lock:
            self.agent.learn(self._streams.order.host.snapshot())
            self.agent.learn(stream.agent.snapshot())

    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
        event = FakeEvent(self._streams) if event is None else event
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.record_event().synchronize()

    def query(self) -> bool:
        self._streams.may_spoil("Stream.query()")
        return self._streams.order.host.knows(self.agent.snapshot())

    def __repr__(self) -> str:
        return self.agent.name


class FakeEvent:
    """What ``torch.cuda.Event`` makes."""

    def __init__(self, streams: Streams, enable_timing: bool = False) -> None:
        self._streams, self._is_timed = streams, enable_timing
        self.clock: dict[Agent, int] | None = None
        self._seconds = 0.0
        self._was_asked = False

    def record(self, stream: FakeStream | None = None) -> None:
        stream = self._streams.current_stream() if stream is None else stream
        with self._streams.lock:
            self._streams.order.enqueue(stream.agent)
            self.clock = stream.agent.snapshot()
        self._seconds, self._was_asked = perf_counter(), False

    def wait(self, stream: FakeStream | None = None) -> None:
        (self._streams.current_stream() if stream is None else stream).wait_event(self)

    def query(self) -> bool:
        self._streams.may_spoil("Event.query()")
        with self._streams.lock:
            host = self._streams.order.host
            if self._was_asked:
                host.learn(self.clock or {})
            self._was_asked = True
            return host.knows(self.clock or {})

    def synchronize(self) -> None:
        if self._streams.wait(self.clock or {}, "Event.synchronize()"):
            self._streams.stalls.stall()

    def elapsed_time(self, end: FakeEvent) -> float:
        if not (self._is_timed and end._is_timed):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        host = self._streams.order.host
        if not all(event.clock and host.knows(event.clock) for event in (self, end)):
            raise RuntimeError("CUDA error: device not ready")
        return 1000 * (end._seconds - self._seconds)
