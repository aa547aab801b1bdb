"""Current streams, passed from the caller's thread to the replicas' threads and to merges.

[Note: Whose stream is current]
Problem: the current stream of a GPU is thread-local. Work that one thread enqueues and another
thread uses is in order only if both use the same stream.
Rule:    replicas' threads start with the caller's streams, so
         ``with torch.cuda.stream(s): strategy.run(...)`` reads data that was enqueued on ``s``
         at a merge, one thread uses the data of all replicas: on the stream that each replica
         had when it arrived
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch


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
    def entered(self, device: torch.device) -> Iterator[None]:
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
    """

    def __init__(self, rows: Sequence[Sequence[torch.device]]) -> None:
        self._rows = tuple(rows)
        self._noted: dict[torch.device, dict[Any, None]] = {}
        self._have_noted: set[tuple[int, torch.device]] = set()

    def record(self, replica_id: int, device: torch.device | None = None) -> None:
        """Records the current streams of the calling replica, on all its devices or on one."""
        for gpu in self._rows[replica_id] if device is None else (device,):
            stream = torch.cuda.current_stream(gpu)
            self._noted.setdefault(gpu, {})[stream] = None
            self._have_noted.add((replica_id, gpu))

    def are_complete(self, column: Sequence[torch.device]) -> bool:
        """Whether all replicas have recorded their streams at this position."""
        return self._have_noted.issuperset(enumerate(column))

    def keep(self, read: Sequence[Sequence[Any]], made: Sequence[Sequence[Any]]) -> None:
        """Keeps the allocator from reusing tensors' memory while streams still need it.

        Args:
            read: per replica, tensors that this thread's streams read and the caller drops.
            made: per replica, tensors from this thread's streams, for the recorded streams.

        All are on the replicas' first devices.
        """
        for device, others, mine in zip((row[0] for row in self._rows), read, made, strict=True):
            stream = torch.cuda.current_stream(device)
            for tensor in others:
                tensor.record_stream(stream)
            for tensor in mine:
                for noted in self._noted.get(device, ()):
                    tensor.record_stream(noted)

    def forget(self) -> None:
        """Drops the recorded streams."""
        self._noted, self._have_noted = {}, set()

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
