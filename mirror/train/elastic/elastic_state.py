"""ElasticState: the state of a training, committed to memory and restored from it.

A commit is a snapshot in host memory, the one of a checkpoint: models, optimizers, positions of
datasets, random generators. Every worker keeps a whole one, with the states in which workers
differ. It counts on a worker once that worker knows that all have come to it:

    1. copy       the snapshot goes to a spare buffer; the last commit stays valid
    2. exchange   all workers come; each sends its own random state, and whether it knows of a
                  worker that waits to join
    3. count      the buffers are swapped, and the commit has a number

A worker that is lost in 2 leaves some workers with the new commit and some with the last one. Both
are right, as all workers hold the same training. The newest commit of any worker that is left
counts: the coordinator makes that worker rank 0, and it sends the commit to the workers without
it. So no step after it is counted, and none before it is repeated.

New workers join only after 3, where all workers stop together. They lose no step.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from mirror.errors import CheckpointError, StrategyError
from mirror.train.checkpoint.checkpoint import Checkpoint, refuse_in_run
from mirror.train.checkpoint.checkpoint_agreement import WorkerAgreement, worker_agreement_of
from mirror.train.checkpoint.snapshot import (
    Contents,
    Snapshot,
    StagingBuffers,
    copy_to_host,
)
from mirror.train.elastic.membership import CommitId

if TYPE_CHECKING:
    from mirror.train.elastic.member import Member


class WorkersChanged(BaseException):
    """Ends a call of the training function, at a commit, since other workers wait to join.

    It is no Exception, so that no handler of the training function takes it for an error.
    """


@dataclass(frozen=True)
class _Commit:
    """A commit in memory.

    Attributes:
        num_workers: the number of workers that made it.
    """

    id: CommitId
    num_workers: int
    snapshot: Snapshot


class _Memory:
    """The last commit of this process, and the buffers for the next one."""

    def __init__(self) -> None:
        self.last: _Commit | None = None
        self.buffers, self.spare = StagingBuffers(), StagingBuffers()
        self.member: Member | None = None
        self.generation = 0
        self.is_used = False

    @property
    def last_id(self) -> CommitId:
        return CommitId() if self.last is None else self.last.id

    def count(self, commit: _Commit) -> None:
        """Makes a commit the last one; its tensors are in ``spare``."""
        self.buffers, self.spare = self.spare, self.buffers
        self.last = commit
        if self.member is not None:
            self.member.commit = commit.id


_memory = _Memory()


def set_member(member: Member | None, generation: int) -> None:
    """Begins a generation, or ends it with None."""
    _memory.member, _memory.generation, _memory.is_used = member, generation, False


class ElasticState:
    """Commits objects to memory, and restores them from the newest commit of any worker.

    ::

        state = ElasticState(model=model, optimizer=optimizer, batches=batches, progress=progress)
        state.restore()
        for batch in batches:
            strategy.run(train_step, args=(batch,))
            progress["step"] += 1
            if progress["step"] % 10 == 0:
                state.commit()

    All workers call both at the same place of the training function, which makes one ElasticState.
    """

    def __init__(self, /, **objects: object) -> None:
        """Takes the objects of a ``mirror.Checkpoint``, by name.

        Raises:
            CheckpointError: an object can be neither saved nor restored.
            StrategyError: the training function has made another one.
        """
        if _memory.is_used and _memory.member is not None:
            raise StrategyError(
                "a training function has one ElasticState, with everything that it changes; "
                "put the objects of both into one"
            )
        _memory.is_used = True
        self._checkpoint = Checkpoint(**objects)
        self._is_restored = False

    def commit(self) -> None:
        """Commits the state to memory. New workers join here, so ``commit`` may not return.

        Raises:
            CheckpointError: a value cannot be copied, which is named.
            StrategyError: called inside ``run``, or before ``restore``.
            WorkerLostError: a worker is lost.
        """
        refuse_in_run("ElasticState.commit")
        if not self._is_restored:
            raise StrategyError(
                "a worker that joins later gets the others' state from ElasticState.restore; call "
                "it once before the first commit"
            )
        objects = self._checkpoint.objects
        workers = worker_agreement_of(objects)
        with torch.inference_mode(False):
            # 1. copy
            whole = workers.take("ElasticState.commit", objects, lambda: None)
            snapshot = whole.with_tensors(_memory.spare.copy(whole.tensors))
        # 2. exchange
        member = _memory.member
        if member is not None:
            member.check_coordinator()
        is_due = member is not None and member.is_change_due
        is_due = bool(workers.agree("ElasticState.commit, to join", int(is_due)))
        # 3. count
        number = _memory.last_id.number + 1
        commit_id = CommitId(_memory.generation, number)
        _memory.count(_Commit(commit_id, workers.size, snapshot))
        if is_due:
            raise WorkersChanged

    def restore(
        self,
        otherwise: Callable[[], object] | None = None,
        *,
        on_resize: Callable[[int, int], object] | None = None,
    ) -> bool:
        """Restores the newest commit of any worker; returns whether there is one.

        If there is none, this is the start of the training, and its state becomes the first
        commit.

        Args:
            otherwise: called without arguments at the start of the training, before the first
                commit: ``manager.restore_latest``, say.
            on_resize: called as ``on_resize(before, now)`` after the restore, if the commit was
                made by another number of workers: to change the rate of the optimizer, say.

        Raises:
            CheckpointError: the objects are not those of the commit.
            StrategyError: called inside ``run``.
            WorkerLostError: a worker is lost.
        """
        refuse_in_run("ElasticState.restore")
        workers = worker_agreement_of(self._checkpoint.objects)
        found = self._find_newest(workers)
        self._is_restored = True
        if found is None:
            if otherwise is not None:
                otherwise()
            self.commit()
            return False
        copies = found.snapshot.with_tensors(copy_to_host(found.snapshot.tensors))
        self._checkpoint.restore_contents(_contents(copies, workers))
        if on_resize is not None and found.num_workers != workers.size:
            on_resize(found.num_workers, workers.size)
        return True

    def _find_newest(self, workers: WorkerAgreement) -> _Commit | None:
        """Returns the newest commit; rank 0 has it, and sends it to workers without it."""
        if not workers.is_multi_worker:
            return _memory.last
        payload = json.dumps(_memory.last_id).encode()
        answers = workers.all_gather_bytes("ElasticState.restore", payload)
        ids = [CommitId(*json.loads(answer)) for answer in answers]
        if max(ids) > ids[0]:
            raise CheckpointError(f"worker 0 must have the newest commit; the workers have {ids}")
        if ids[0] == CommitId():
            return None
        if min(ids) < ids[0]:
            self._receive(workers)
        return _memory.last

    def _receive(self, workers: WorkerAgreement) -> None:
        """Sends the commit from rank 0 to all workers; the ones that have it receive it again."""
        own = _memory.last if workers.is_chief else None
        head = [] if own is None else [own.id, own.num_workers]
        tensors = [] if own is None else own.snapshot.to_tensors()
        text, received = workers.broadcast("a commit", json.dumps(head).encode(), tensors)
        if not workers.is_chief:
            commit_id, num_workers = json.loads(text)
            snapshot = Snapshot.from_tensors(received)
            copies = snapshot.with_tensors(_memory.spare.copy(snapshot.tensors))
            _memory.count(_Commit(CommitId(*commit_id), num_workers, copies))


def _contents(snapshot: Snapshot, workers: WorkerAgreement) -> Contents:
    """Returns a commit as the contents of a checkpoint."""
    has_own = len(snapshot.manifest.workers) == workers.size
    own = Snapshot(snapshot.manifest, snapshot.tensors, workers.rank if has_own else 0)
    return Contents(
        Path("the last commit"), own, own.states(), own.random_state(), own.replica_buffers()
    )
