"""Elastic training: ``run`` calls a training function again whenever the workers change.

A strategy that has lost a worker cannot be used any more: a step may be half done, on some
replicas, with sums in flight. So a new generation does not repair the strategy. The training
function is called again: it makes a strategy, a model and an optimizer, as at the start of the
program, and ``ElasticState.restore`` gives them the newest commit, from memory. The process stays,
with its imports, its data, its GPU and its compiled programs, which is where a restart takes its
time. So nothing of a lost generation can leak into the next one.

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

import gc
import json
import logging
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TypeVar

import torch

from mirror.cluster.rendezvous import split_address
from mirror.comm.workers.distributed_group import use_heartbeats
from mirror.comm.workers.heartbeat import HeartbeatStore
from mirror.errors import (
    CheckpointError,
    DivergenceError,
    MirrorError,
    StrategyError,
    WorkerLostError,
)
from mirror.strategy.group import all_groups
from mirror.train.checkpoint.checkpoint import (
    Checkpoint,
    WorkerAgreement,
    refuse_in_run,
    worker_agreement_of,
)
from mirror.train.checkpoint.snapshot import Contents, Snapshot, StagingBuffers, copy_to_host
from mirror.train.checkpoint.stateful_objects import capture_global_rng, restore_global_rng
from mirror.train.elastic.member import Member, connect_member, is_elastic
from mirror.train.elastic.membership import CommitId, MemberState, View

T = TypeVar("T")

_log = logging.getLogger("mirror")

_IDENTITY = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
# How long to wait until the coordinator knows that another worker has failed.
_REASON_SECONDS = 3.0
_MAX_ATTEMPTS = 20  # so many generations in a row may end without a commit
_members: list[Member] = []  # at most one: this process


def run(train: Callable[[], T]) -> T:
    """Calls a training function, again whenever a worker is lost or joins; returns its result.

    ::

        def train():
            strategy = mirror.MultiWorkerMirroredStrategy()
            with strategy.scope():
                model = Net()
                optimizer = torch.optim.AdamW(model.parameters())
            batches = strategy.distribute_dataset(loader)
            progress = {"epoch": 0, "step": 0}
            state = mirror.train.elastic.ElasticState(
                model=model, optimizer=optimizer, batches=batches, progress=progress
            )
            state.restore()
            while progress["epoch"] < 3:
                for batch in batches:
                    strategy.run(train_step, args=(batch,))
                    progress["step"] += 1
                    if progress["step"] % 10 == 0:
                        state.commit()
                progress["epoch"] += 1

        mirror.train.elastic.run(train)

    ``mirror elastic --workers 1:2 train.py`` starts the workers. Without it ``train`` is called
    once.

    Args:
        train: makes the strategy and all that it changes, so that it can begin again. Every call
            begins with the random state of the first one. Steps after the last commit, and what
            ``train`` does after its last step, may happen more than once.

    Raises:
        BaseException: what ``train`` raises, unless the reason is a lost worker.
        ClusterError: the coordinator has ended the training, or is not reached at the start.
        WorkerLostError: the coordinator is lost.
        StrategyError: called inside ``run`` or ``train``.
    """
    if not _members:
        if not is_elastic():
            return train()
        found = _connect_when_ready()
        _members.append(found)
    elif _members[0].is_training:
        raise StrategyError("elastic.run was called inside its training function; call it once")
    member = _members[0]
    random_state = capture_global_rng()
    commit, num_attempts = member.commit, 0
    while True:
        if member.commit != commit:
            commit, num_attempts = member.commit, 0
        num_attempts += 1
        if num_attempts > _MAX_ATTEMPTS:
            why = f"{_MAX_ATTEMPTS} generations have ended without a commit"
            member.end(MemberState.DIVERGED, why)
            raise WorkerLostError(f"{why}; see the logged reasons, and check the network")
        view = member.join()
        if view is None:
            _log.warning("the elastic training has ended before this worker could join")
            raise SystemExit(0)
        restore_global_rng(random_state)
        results: list[T] = []
        with _generation(member, view):
            _attempt(train, member, results)
        if results and member.finish():
            return results[0]


def _connect_when_ready() -> Member:
    """Returns this process as a member, once it has imported what the first step needs.

    The other workers train meanwhile; they wait for a worker that has registered.
    """
    import_module("mirror.comm.workers.distributed_group")
    import_module("mirror.comm.workers.nccl_all_reduce")
    torch.optim.SGD([torch.zeros(1)], lr=0.1)  # the first optimizer imports torch's compiler
    return connect_member()


def _attempt(train: Callable[[], T], member: Member, results: list[T]) -> None:
    """Calls ``train``; adds its result, unless the workers have changed meanwhile.

    Raises:
        BaseException: an error with another reason.
    """
    try:
        results.append(train())
    except WorkersChanged:
        member.leave_generation()
    except Exception as error:
        if not _is_by_loss(error, member):
            has_diverged = isinstance(error, DivergenceError)
            state = MemberState.DIVERGED if has_diverged else MemberState.FAILED
            member.end(state, f"{type(error).__name__}: {error}")
            raise
        _log.warning("%s", str(error).splitlines()[0])
        member.leave_generation()
        for one in _chain(error):  # its frames hold the model
            traceback.clear_frames(one.__traceback__)
    except BaseException as error:
        member.end(MemberState.FAILED, f"{type(error).__name__}: {error}")
        raise


def _is_by_loss(error: BaseException, member: Member) -> bool:
    """Returns whether a lost worker is the reason of an error."""
    chain = _chain(error)
    if any(isinstance(one, WorkerLostError) for one in chain):
        return not member.is_broken
    is_ours = any(isinstance(one, MirrorError) for one in chain)
    return is_ours and member.is_over_within(_REASON_SECONDS)


def _chain(error: BaseException) -> list[BaseException]:
    """Returns an error and the errors that it was raised from."""
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in chain:
        chain.append(cause)
        cause = cause.__cause__ or cause.__context__
    return chain


@contextmanager
def _generation(member: Member, view: View) -> Iterator[None]:
    """Lets strategies use the workers of a generation; closes these strategies afterwards."""
    rank, size = view.members.index(member.name), len(view.members)
    for name in _IDENTITY:
        os.environ.pop(name, None)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size)}
    heartbeats: HeartbeatStore | None = None
    if size > 1:
        host, port = split_address(member.address)
        os.environ |= {"MASTER_ADDR": host, "MASTER_PORT": str(port)}
        heartbeats = HeartbeatStore(
            member.store_of(view.generation), rank, size, lambda error: "", hosts_store=False
        )
        use_heartbeats(heartbeats)
        member.watch(heartbeats.interrupt)
    set_member(member, view.generation)
    try:
        yield
    finally:
        set_member(None, 0)
        member.watch(lambda why: None)
        for group in all_groups():
            if group.replicas.workers.is_multi_process:
                group.close()
        use_heartbeats(None)
        if heartbeats is not None:
            heartbeats.deregister()
        gc.collect()


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
