"""WorkerAgreement: the chief writes a checkpoint, all workers restore it, and all agree on it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mirror.comm.workers.worker_group import LocalWorkerGroup
from mirror.errors import CheckpointError
from mirror.strategy.group import all_groups
from mirror.train.checkpoint.snapshot import (
    Contents,
    Snapshot,
    read_contents,
    take_snapshot,
    take_worker_snapshot,
)

_ONE_WORKER = LocalWorkerGroup(1)
_SHARED = "; all workers must see the same directory, on a file system that their machines share"
_FAILED, _DONE = b"!", b"."  # the first byte of a worker's message


class WorkerAgreement:
    """The workers that save and restore together.

    Worker 0, the chief, writes the state of the one logical model. Some states may differ between
    workers: random generators, and per-replica buffers. If they do, the chief receives them, and
    they go into the same checkpoint. So every worker calls ``save`` and ``restore``, at the same
    place of the program. The calls return when the chief's file is on the disk, or raise on all
    workers.

    On restoring, each worker reads the checkpoint, and the workers compare what they have read.
    The error names a worker that sees another directory, for example because it is not shared
    between machines. With another number of workers, all continue with the chief's state.

    Args:
        workers: the group.
        is_open: whether their strategy is still open.
    """

    def __init__(self, workers: LocalWorkerGroup, *, is_open: bool) -> None:
        self._workers = workers
        self.rank, self.size = workers.rank, workers.size
        self.is_chief = workers.rank == 0
        self.is_multi_worker = workers.is_multi_process and is_open

    def take(self, what: str, objects: Mapping[str, Any], wait: Callable[[], None]) -> Snapshot:
        """Returns the states of objects, with the own states of all workers.

        All workers call it, as some states are combined from all workers, and get the same states.

        Args:
            wait: waits for the save before; may raise its error.

        Raises:
            CheckpointError: on all workers, a worker has a value that cannot be written.
        """
        found: list[Snapshot] = []

        def digest() -> bytes:
            found.append(take_snapshot(objects))  # first: all workers gather state that is sharded
            wait()
            return take_worker_snapshot(objects).digest() if self.is_multi_worker else b""

        if not self.is_multi_worker:
            digest()
            return found[0]
        if len(set(self._exchange(what, digest))) == 1:
            return found[0]
        snapshot = take_worker_snapshot(objects, f"worker {self.rank}/")
        messages = self._workers.exchange_tensors(what, "own", snapshot.to_tensors())
        chief, *others = (Snapshot.from_tensors(message.tensors) for message in messages)
        whole = found[0] if self.is_chief else found[0].with_chief(chief)
        return whole.with_workers(others)

    def run_on_chief(self, what: str, fn: Callable[[], None]) -> None:
        """Calls a function on the chief; the other workers wait for it.

        Raises:
            CheckpointError: on all workers, it failed.
        """
        if not self.is_multi_worker:
            if self.is_chief:
                fn()
            return

        def call() -> bytes:
            if self.is_chief:
                fn()
            return b""

        self._exchange(what, call)

    def choose(self, what: str, fn: Callable[[], str]) -> str:
        """Returns what a function returns on the chief.

        Raises:
            CheckpointError: on all workers, it failed.
        """
        if not self.is_multi_worker:
            return fn()
        return self._exchange(what, lambda: fn().encode() if self.is_chief else b"")[0].decode()

    def read(self, path: str | os.PathLike[str], known: Contents | None = None) -> Contents:
        """Reads a checkpoint, and compares it with what the other workers read.

        Args:
            known: the checkpoint, if it was read already.

        Raises:
            CheckpointError: on all workers, a worker cannot read it, or has read another one.
        """
        found = [] if known is None else [known]

        def digest() -> bytes:
            if not found:
                found.append(read_contents(path, self.rank, self.size))
            return found[0].snapshot.manifest.digest

        if not self.is_multi_worker:
            digest()
            return found[0]

        digests = self._exchange("what was read of a checkpoint", digest)
        others = [w for w, one in enumerate(digests) if one != digests[0]]
        if others:
            raise CheckpointError(
                f"all workers must restore the same checkpoint; worker {others[0]} of {self.size} "
                f"has read another one than worker 0 (here: {path}); give all workers one "
                "directory, on a file system that their machines share"
            )
        return found[0]

    def agree(self, what: str, urgency: int) -> int:
        """Returns the highest urgency, from 0, of any worker."""
        if not self.is_multi_worker:
            return urgency
        return max(map(int, self._workers.exchange(what, payload=lambda: b"%d" % urgency)))

    def broadcast(
        self, what: str, head: bytes, tensors: Sequence[Tensor]
    ) -> tuple[bytes, list[Tensor]]:
        """Returns bytes and tensors of the chief; those of the other workers are not used."""
        described = [[str(t.dtype).removeprefix("torch."), list(t.shape)] for t in tensors]
        own = json.dumps([head.hex(), described]).encode() if self.is_chief else b""
        text, described = json.loads(self.all_gather_bytes(what, own)[0])
        if not self.is_chief:
            tensors = [torch.empty(shape, dtype=getattr(torch, name)) for name, shape in described]
        self._workers.broadcast(what, tensors)
        return bytes.fromhex(text), list(tensors)

    def all_gather_bytes(self, what: str, message: bytes) -> list[bytes]:
        """Returns the messages of all workers, in the order of their ranks."""
        return self._workers.exchange(what, payload=lambda: message)

    def _exchange(self, what: str, fn: Callable[[], bytes]) -> list[bytes]:
        """Returns what a function returns on each worker; raises on all if it fails on one."""
        error: Exception | None = None
        try:
            own = _DONE + fn()
        except Exception as failed:
            error, own = failed, _FAILED + str(failed).encode()
        messages = self._workers.exchange(what, payload=lambda: own)
        if error is not None:
            raise error
        for rank, message in enumerate(messages):
            if message.startswith(_FAILED):
                raise CheckpointError(
                    f"worker {rank} of {self.size}: {message[1:].decode()}"
                    + (_SHARED if rank else "")
                )
        return [message[1:] for message in messages]


def worker_agreement_of(objects: Mapping[str, Any]) -> WorkerAgreement:
    """Returns the workers that train these objects together; one worker by default."""
    groups = [group for group in all_groups() if group.replicas.workers.is_multi_process]
    if not groups:
        return WorkerAgreement(_ONE_WORKER, is_open=False)
    for tensor in (tensor for obj in objects.values() for tensor in _tensors(obj)):
        for group in groups:
            if group.registry.owns(tensor):
                return WorkerAgreement(group.replicas.workers, is_open=not group.runner.is_closed)
    open_groups = [group for group in groups if not group.runner.is_closed]
    if not open_groups:
        return WorkerAgreement(_ONE_WORKER, is_open=False)
    return WorkerAgreement(open_groups[0].replicas.workers, is_open=True)


def _tensors(obj: object) -> list[Tensor]:
    if isinstance(obj, nn.Module):
        return [*obj.parameters(), *obj.buffers()]
    if isinstance(obj, Optimizer):
        return [parameter for group in obj.param_groups for parameter in group["params"]]
    return []
