"""The streams that are current in one thread, carried to others: of the caller, and of replicas.

[Note: Whose stream is current]
Which stream of a GPU is current, every thread says for itself. So what one thread enqueues and
another one uses is in order only if both mean the same stream. Two do not by themselves:

    the caller and its replicas     Replicas in threads of their own begin with the caller's
                                    streams, so ``with torch.cuda.stream(s): strategy.run(...)``
                                    reads what was enqueued on ``s``, and so does what follows.
    a replica and who acts for all  Where replicas meet, one thread works with what all have
                                    brought: on the stream of each that it had when it came.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch


class CallerStreams:
    """The streams of some GPUs that are current where this is made."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        gpus = dict.fromkeys(devices)
        self._streams = {gpu: torch.cuda.current_stream(gpu) for gpu in gpus}
        # Those that other threads do not begin with.
        self._unusual = {
            gpu: stream
            for gpu, stream in self._streams.items()
            if stream != torch.cuda.default_stream(gpu)
        }

    @contextmanager
    def entered(self, device: torch.device) -> Iterator[None]:
        """Makes them current in this thread, with ``device``; puts back what was."""
        with ExitStack() as stack:
            for gpu, stream in self._unusual.items():
                if gpu != device:
                    stack.enter_context(torch.cuda.stream(stream))
            # Usual or not: what a replica may set without a context is undone.
            stack.enter_context(torch.cuda.stream(self._streams[device]))
            yield


class ReplicaStreams:
    """The streams on which replicas have enqueued what they bring to where they meet.

    Args:
        rows: the GPUs of each replica.
    """

    def __init__(self, rows: Sequence[Sequence[torch.device]]) -> None:
        self._rows = tuple(rows)
        self._noted: dict[torch.device, dict[Any, None]] = {}
        self._have_noted: set[tuple[int, torch.device]] = set()

    def record(self, replica_id: int, device: torch.device | None = None) -> None:
        """Notes the streams of a replica, whose thread this is, or that on one of its devices."""
        for gpu in self._rows[replica_id] if device is None else (device,):
            stream = torch.cuda.current_stream(gpu)
            self._noted.setdefault(gpu, {})[stream] = None
            self._have_noted.add((replica_id, gpu))

    def are_complete(self, column: Sequence[torch.device]) -> bool:
        """Whether those of all replicas have been noted, on the device that each has here."""
        return self._have_noted.issuperset(enumerate(column))

    def keep(self, read: Sequence[Sequence[Any]], made: Sequence[Sequence[Any]]) -> None:
        """Has memory kept until this thread's streams have read it, and for replicas' streams.

        Args:
            read: per replica, tensors that the caller lets go of, read on this thread's streams.
            made: per replica, tensors made on them, for the streams noted.

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
        """Drops what was noted."""
        self._noted, self._have_noted = {}, set()

    @contextmanager
    def make_caller_wait(self) -> Iterator[None]:
        """Makes them current in this thread; of several on one GPU one, ordered with the others.

        What is enqueued inside comes after what was enqueued on all of them, and before what will
        be.
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
