"""SequencedGroup: a process group of one strategy that counts the operations started on it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from time import sleep
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore

from mirror.base.at_fork import reinit_after_fork
from mirror.comm.workers.heartbeat import HeartbeatStore
from mirror.comm.workers.monitored_wait import BackgroundCall, MonitoredWait
from mirror.comm.workers.worker_status import Exit, PendingOp

_POLL_SECONDS = 0.002
_SAID_SECONDS = 1.0


class SequencedGroup:
    """A process group in which all workers start the operations in the same order.

    Args:
        name: "NUMBER/...", by the strategy's number.
    """

    def __init__(self, name: str, board: HeartbeatStore) -> None:
        self.name = name
        self.group: Any = None
        self._board = board
        self._num_begun = 0
        self._begun: dict[int, Any] = {}

    def next(self, words: str) -> PendingOp:
        """Counts an operation that is about to be begun."""
        self._num_begun += 1
        self._board.begun[self.name] = self._num_begun
        return PendingOp(self.name, self._num_begun, words)

    def begin(self, words: str, call: Callable[[Any], dist.Work]) -> tuple[dist.Work, PendingOp]:
        """Begins an operation of the group."""
        wait = self.next(words)
        work = self._begun[wait.number] = call(self.group)
        return work, wait

    def begin_sum(self, buffer: Tensor) -> tuple[int, dist.Work]:
        """Begins to sum a buffer; returns the operation's number beside it, as steps want."""
        number = self._num_begun = self._num_begun + 1
        self._board.begun[self.name] = number
        work = self._begun[number] = self.group.allreduce([buffer])
        return number, work

    def ended(self, number: int) -> None:
        """Notes that an operation has come to its end."""
        self._begun.pop(number, None)

    def drop(self, *, forgets: bool) -> None:
        """Drops the group, or leaks it if it must never be destroyed.

        The destructor of a group waits for its works, up to the group's timeout if a worker is
        lost. It would do so wherever the last reference ends, also at the interpreter's exit.
        """
        works, self._begun = list(self._begun.values()), {}
        group, self.group = self.group, None
        if forgets or not all(work.is_completed() for work in works):
            for kept in (group, *works):
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


class Groups:
    """All links of one strategy.

    Args:
        seconds: how long a worker may take to make its end of one.
    """

    def __init__(self, board: HeartbeatStore, watch: MonitoredWait, seconds: float) -> None:
        self.number = board.number()
        self._board, self._watch = board, watch
        # One that runs out breaks a group for good: who waits has a shorter one.
        self._timeout = timedelta(seconds=seconds + 60)
        self._links: dict[str, SequencedGroup] = {}
        self._is_forked = False
        self.end: Exit | None = None
        board.keep(self.number, self)
        reinit_after_fork(self)

    def after_fork(self) -> None:
        """Forgets the groups in a forked process: their threads are in the other one."""
        self._is_forked = True

    def get(self, name: str, words: Callable[[], str]) -> SequencedGroup:
        """Returns a link; where there is none yet, it is made, by all workers."""
        if name not in self._links:
            link = SequencedGroup(f"{self.number}/{name}", self._board)
            wait = link.next(words())
            try:
                errand = BackgroundCall(partial(self._make, link.name))
                link.group = self._watch.wait(errand, lambda: wait)
            except BaseException:
                self._board.begun.pop(link.name, None)  # now nobody counts on this worker there
                raise
            self._links[name] = link
        return self._links[name]

    def drop(self, end: Exit) -> None:
        """Ends all links; the others are told of it before. Idempotent."""
        if self.end is not None:
            return
        self.end = end
        self._board.end(self.number, end).wait(_SAID_SECONDS)
        while self._links:
            self._links.popitem()[1].drop(forgets=self._is_forked)

    def _make(self, name: str) -> Any:
        board = self._board
        store = PrefixStore(f"mirror/{name}", board.store)
        # torch waits for who has not come without an end that we could set, or find out whose.
        store.set(f"here/{board.rank}", "")
        every = [f"here/{rank}" for rank in range(board.size)]
        pause = _POLL_SECONDS
        while not store.check(every):
            if self.end is not None:
                raise RuntimeError(f"the strategy has come to its end: {self.end.words}")
            sleep(pause)
            pause = min(2 * pause, 0.1)
        return dist.ProcessGroupGloo(store, board.rank, board.size, self._timeout)
