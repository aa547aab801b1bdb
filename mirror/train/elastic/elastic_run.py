"""``mirror.train.elastic.run``: calls a training function again whenever the workers change.

A strategy that has lost a worker cannot be used any more: a step may be half done, on some
replicas, with sums in flight. So a new generation does not repair the strategy. The training
function is called again: it makes a strategy, a model and an optimizer, as at the start of the
program, and ``ElasticState.restore`` gives them the newest commit, from memory. The process stays,
with its imports, its data, its GPU and its compiled programs, which is where a restart takes its
time. So nothing of a lost generation can leak into the next one.
"""

from __future__ import annotations

import gc
import logging
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import TypeVar

import torch

from mirror.cluster.rendezvous import split_address
from mirror.comm.workers.heartbeat import HeartbeatStore
from mirror.comm.workers.worker_rendezvous import use_heartbeats
from mirror.errors import DivergenceError, MirrorError, StrategyError, WorkerLostError
from mirror.strategy.group import all_groups
from mirror.train.checkpoint.stateful_objects import capture_global_rng, restore_global_rng
from mirror.train.elastic.elastic_state import WorkersChanged, set_member
from mirror.train.elastic.member import Member, connect_member, is_elastic
from mirror.train.elastic.membership import MemberState, View

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
        _close_strategies()
        use_heartbeats(None)
        if heartbeats is not None:
            heartbeats.deregister()
        gc.collect()


def _close_strategies() -> None:
    """Closes the strategies of several workers."""
    for group in all_groups():
        if group.replicas.workers.is_multi_process:
            group.close()
