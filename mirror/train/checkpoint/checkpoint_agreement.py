"""Checkpoints over several workers: the chief writes, all restore, and all agree on it.

[Note: Checkpoints of workers]
There is one logical copy of everything, and worker 0, the chief, writes it. What workers may have
of their own (random generators, buffers that replicas keep apart) goes to the chief, where it is
not the same on all, and into the same checkpoint. So every
worker calls ``save`` and ``restore``, at the same place of the program; they return when the
chief's files are on the disk, or raise on all workers.

On restoring, each worker reads the checkpoint, and what it has read is compared: one that sees
another directory, as where it is not shared between machines, is named. A training of another
number of workers goes on with what was the chief's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from mirror.comm.workers.worker_group import LocalWorkerGroup
from mirror.errors import CheckpointError
from mirror.strategy.group import all_groups
from mirror.train.checkpoint.read_checkpoint import Contents, read_contents
from mirror.train.checkpoint.snapshot import OwnState, Snapshot, pack, pack_own

_ALONE = LocalWorkerGroup(1)
_FAILED, _DONE = b"!", b"."  # how what a worker says of itself begins


class WorkerAgreement:
    """The workers that save and restore together.

    Args:
        workers: they.
        can_talk: whether their strategy is still open.
    """

    def __init__(self, workers: LocalWorkerGroup, *, can_talk: bool) -> None:
        self._workers = workers
        self.rank, self.size = workers.rank, workers.size
        self.is_chief = workers.rank == 0
        self.are_several = workers.is_multi_process and can_talk

    def packed(self, what: str, objects: Mapping[str, Any], wait: Callable[[], None]) -> Snapshot:
        """Takes the states of objects; what others have of their own beside the chief's.

        All workers take them, as some are put together from those of all.

        Args:
            wait: for the save before, which may have gone wrong.

        Raises:
            CheckpointError: on all workers, one has what cannot be written.
        """
        found: list[Snapshot] = []

        def digest() -> bytes:
            wait()
            found.append(pack(objects))
            return pack_own(objects, "").digest() if self.are_several else b""

        if not self.are_several:
            digest()
            return found[0]
        if len(set(self._receive(what, digest))) == 1:
            return found[0]
        mine = pack_own(objects, f"worker {self.rank}/")
        parcels = self._workers.exchange_tensors(what, "own", mine.as_tensors())
        others = [OwnState.of_tensors(parcel.tensors) for parcel in parcels[1:]]
        return found[0].with_others(OwnState.join(others))

    def done(self, what: str, do: Callable[[], None]) -> None:
        """Has the chief do something, which the others wait for.

        Raises:
            CheckpointError: on all workers, it went wrong.
        """
        if not self.are_several:
            if self.is_chief:
                do()
            return

        def done() -> bytes:
            if self.is_chief:
                do()
            return b""

        self._receive(what, done)

    def choose(self, what: str, chosen: Callable[[], str]) -> str:
        """Returns what the chief has chosen.

        Raises:
            CheckpointError: on all workers, it could not.
        """
        if not self.are_several:
            return chosen()
        return self._receive(what, lambda: chosen().encode() if self.is_chief else b"")[0].decode()

    def read(self, path: str | os.PathLike[str], known: Contents | None = None) -> Contents:
        """Reads a checkpoint, of which all others read the same.

        Args:
            known: what was read of it already.

        Raises:
            CheckpointError: on all workers, one cannot read it, or has read another.
        """
        found = [] if known is None else [known]

        def digest() -> bytes:
            if not found:
                found.append(read_contents(path, self.rank, self.size))
            return found[0].digest

        if not self.are_several:
            digest()
            return found[0]

        digests = self._receive("what was read of a checkpoint", digest)
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
        if not self.are_several:
            return urgency
        return max(map(int, self._workers.exchange(what, payload=lambda: b"%d" % urgency)))

    def broadcast_error(self, what: str, said: bytes) -> list[bytes]:
        """Gives every worker what each has to say, in the order of their ranks."""
        return self._workers.exchange(what, payload=lambda: said)

    def _receive(self, what: str, make: Callable[[], bytes]) -> list[bytes]:
        """Returns what every worker makes; raises on all if it fails on one."""
        error: Exception | None = None
        try:
            own = _DONE + make()
        except Exception as failed:
            error, own = failed, _FAILED + str(failed).encode()
        said = self._workers.exchange(what, payload=lambda: own)
        if error is not None:
            raise error
        for rank, one in enumerate(said):
            if one.startswith(_FAILED):
                raise CheckpointError(
                    f"worker {rank} of {self.size}: {one[1:].decode()}; all workers must see the "
                    "same directory, on a file system that their machines share"
                    if rank
                    else f"worker 0 of {self.size}: {one[1:].decode()}"
                )
        return [one[1:] for one in said]


def worker_agreement_of(objects: Mapping[str, Any]) -> WorkerAgreement:
    """Returns the workers that train objects together; one, where there are no others."""
    groups = [group for group in all_groups() if group.replicas.workers.is_multi_process]
    if not groups:
        return WorkerAgreement(_ALONE, can_talk=False)
    for tensor in (tensor for obj in objects.values() for tensor in _tensors(obj)):
        for group in groups:
            if group.registry.owns(tensor):
                return WorkerAgreement(group.replicas.workers, can_talk=not group.runner.is_closed)
    going_on = [group for group in groups if not group.runner.is_closed]
    if not going_on:
        return WorkerAgreement(_ALONE, can_talk=False)
    return WorkerAgreement(going_on[0].replicas.workers, can_talk=True)


def _tensors(obj: object) -> list[Tensor]:
    if isinstance(obj, nn.Module):
        return [*obj.parameters(), *obj.buffers()]
    if isinstance(obj, Optimizer):
        return [parameter for group in obj.param_groups for parameter in group["params"]]
    return []
