"""Rendezvous of the workers, through torch's default process group and a fresh part of its store.

torchrun keeps one store for all its attempts. A restarted worker would find addresses of ended
workers there, and would wait for them forever. The attempt's number does not help, because the
agents of several machines count separately. So worker 0 chooses a random prefix, and sends it to
each worker under a key that this worker has chosen. No worker can mistake an old answer for its
own.
"""

from __future__ import annotations

import os
import secrets
from datetime import timedelta
from time import monotonic, sleep

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from mirror.base.torch_private import default_store
from mirror.comm.workers.heartbeat import HeartbeatStore, LineOf
from mirror.comm.workers.monitored_wait import BackgroundCall
from mirror.errors import ClusterError, MirrorError, WorkerLostError

_PAUSE_SECONDS = 0.02


def store_for_run(store: Store, rank: int, size: int, seconds: float) -> Store:
    """Returns a part of a store that only the workers of this attempt use.

    Raises:
        RuntimeError: a worker has not joined in time.
    """
    own = secrets.token_hex(8)  # must not draw from the training's random generators
    if rank:
        store.set(f"mirror/come/{rank}", own)
        answer = f"mirror/answer/{own}"
        store.wait([answer], timedelta(seconds=seconds))
        fresh = PrefixStore(f"mirror/{store.get(answer).decode()}", store)
        fresh.set(f"here/{rank}", "")
        return fresh
    fresh = PrefixStore(f"mirror/{own}", store)
    deadline, answered = monotonic() + seconds, set[bytes]()
    missing = list(range(1, size))
    while missing:
        for other in missing:
            if store.check([f"mirror/come/{other}"]):
                name = store.get(f"mirror/come/{other}")
                if name not in answered:
                    store.set(f"mirror/answer/{name.decode()}", own)
                    answered.add(name)
        missing = [other for other in missing if not fresh.check([f"here/{other}"])]
        if missing and monotonic() > deadline:
            raise RuntimeError(f"worker {missing[0]} is missing")
        if missing:
            sleep(_PAUSE_SECONDS)
    return fresh


_SLICE = timedelta(seconds=0.5)
# Torch's own timeout should come first: a thread inside torch at exit crashes the process.
_GRACE_SECONDS = 20.0
# At most one; it is replaced if there is another default process group.
_heartbeat_stores: list[tuple[Store, HeartbeatStore]] = []
_given: list[HeartbeatStore] = []  # at most one, of an elastic training


def use_heartbeats(heartbeats: HeartbeatStore | None) -> None:
    """Sets the workers that ``join_rendezvous`` returns, instead of the default process group's.

    A default process group cannot be replaced while a thread may be waiting in it.
    """
    _given[:] = [] if heartbeats is None else [heartbeats]


def join_rendezvous(seconds: float, line_of: LineOf) -> HeartbeatStore:
    """Returns the heartbeat store of all workers; creates the default process group if needed.

    Raises:
        WorkerLostError: a worker has not joined.
    """
    if _given:
        _given[0].line_of = line_of
        return _given[0]
    if not dist.is_initialized():
        call = BackgroundCall(lambda: _init_process_group(seconds))
        deadline = monotonic() + seconds + _GRACE_SECONDS
        while True:
            try:
                call.wait(_SLICE)
                break
            except RuntimeError as error:
                if error is not call.error and monotonic() < deadline:
                    continue
                raise _rendezvous_error(error, seconds) from error
    store = default_store()
    if not _heartbeat_stores or _heartbeat_stores[0][0] is not store:
        _heartbeat_stores[:] = [
            (store, HeartbeatStore(store, dist.get_rank(), dist.get_world_size(), line_of))
        ]
    heartbeats = _heartbeat_stores[0][1]
    heartbeats.line_of = line_of
    return heartbeats


def _rendezvous_error(error: RuntimeError, seconds: float) -> MirrorError:
    """Returns the error for a rendezvous that has failed."""
    reason = str(error).splitlines()[0]
    if "EADDRINUSE" in reason:
        return ClusterError(
            f"worker 0 cannot listen at MASTER_PORT={os.environ.get('MASTER_PORT')}, which "
            f"another process or connection of this machine uses: {reason}; choose another port"
        )
    return WorkerLostError(
        f"not all workers have come to the start within {seconds:g} s: {reason}; start WORLD_SIZE "
        "processes that can reach MASTER_ADDR:MASTER_PORT"
    )


def _init_process_group(seconds: float) -> None:
    """Creates the default process group from the environment variables."""
    timeout = timedelta(seconds=seconds)
    store, rank, size = next(rendezvous("env://", timeout=timeout))
    fresh = store_for_run(store, rank, size, seconds)
    dist.init_process_group("gloo", store=fresh, rank=rank, world_size=size, timeout=timeout)
