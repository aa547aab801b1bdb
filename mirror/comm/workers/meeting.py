"""Meeting: how this process finds the others, through torch's default process group."""

from __future__ import annotations

from datetime import timedelta
from time import monotonic

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from mirror.comm.workers.attempt import store_for_run
from mirror.comm.workers.board import HeartbeatStore, LineOf
from mirror.comm.workers.errand import TIMED_OUT, BackgroundCall
from mirror.errors import WorkerLostError
from mirror.torch_private import default_store

_SLICE = timedelta(seconds=0.5)
# For torch to end by itself: a thread that the interpreter's end finds in torch ends the process.
_GRACE_SECONDS = 20.0
_boards: list[tuple[Store, HeartbeatStore]] = []  # one; another one with another default group


def join_rendezvous(seconds: float, line_of: LineOf) -> HeartbeatStore:
    """Returns the board of all workers; makes the default process group if nobody has.

    Raises:
        WorkerLostError: somebody has not come.
    """
    if not dist.is_initialized():
        begin = BackgroundCall(lambda: _begin(seconds))
        deadline = monotonic() + seconds + _GRACE_SECONDS
        while True:
            try:
                begin.wait(_SLICE)
                break
            except RuntimeError as error:
                if TIMED_OUT in str(error) and monotonic() < deadline:
                    continue
                raise WorkerLostError(
                    f"not all workers have come to the start within {seconds:g} s: "
                    f"{str(error).splitlines()[0]}; start WORLD_SIZE processes that can reach "
                    "MASTER_ADDR:MASTER_PORT"
                ) from error
    store = default_store()
    if not _boards or _boards[0][0] is not store:
        _boards[:] = [
            (store, HeartbeatStore(store, dist.get_rank(), dist.get_world_size(), line_of))
        ]
    board = _boards[0][1]
    board.line_of = line_of
    return board


def _begin(seconds: float) -> None:
    """Makes the default process group, as the environment says."""
    timeout = timedelta(seconds=seconds)
    store, rank, size = next(rendezvous("env://", timeout=timeout))
    fresh = store_for_run(store, rank, size, seconds)
    dist.init_process_group("gloo", store=fresh, rank=rank, world_size=size, timeout=timeout)
