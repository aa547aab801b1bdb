"""The process groups of one strategy; each counts the operations that are started on it."""

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

from mirror.base.process_bound import reinit_after_fork
from mirror.comm.workers.heartbeat import HeartbeatStore
from mirror.comm.workers.monitored_wait import BackgroundCall, MonitoredWait
from mirror.comm.workers.worker_status import Exit, PendingOp

_POLL_SECONDS = 0.002
_PUBLISH_SECONDS = 1.0


class SequencedGroup:
    """A process group in which all workers start the operations in the same order.

    Args:
        name: "NUMBER/...", with the number of the strategy.

    Attributes:
        process_group: torch's group; None until ``Groups.get`` has created it.
    """

    def __init__(self, name: str, heartbeats: HeartbeatStore) -> None:
        self.name = name
        self.process_group: Any = None
        self._heartbeats = heartbeats
        self._num_started = 0
        self._works: dict[int, dist.Work] = {}  # in flight, by number

    def count(self, words: str) -> PendingOp:
        """Counts an operation that is about to start, and returns its description."""
        self._num_started += 1
        self._heartbeats.started[self.name] = self._num_started
        return PendingOp(self.name, self._num_started, words)

    def start(self, words: str, call: Callable[[Any], dist.Work]) -> tuple[dist.Work, PendingOp]:
        """Starts an operation; returns its work and its description."""
        op = self.count(words)
        work = self._works[op.number] = call(self.process_group)
        return work, op

    def start_sum(self, buffer: Tensor) -> tuple[int, dist.Work]:
        """Starts to sum a buffer, as every step does; returns the operation's number and work."""
        number = self._num_started = self._num_started + 1
        self._heartbeats.started[self.name] = number
        work = self._works[number] = self.process_group.allreduce([buffer])
        return number, work

    def finish(self, number: int) -> None:
        """Forgets an operation that is done."""
        self._works.pop(number, None)

    def drop(self, *, leak: bool) -> None:
        """Drops the process group, and leaks it if ``leak`` or if works are in flight.

        The destructor of a process group waits for its works, up to the group's timeout if a
        worker is lost. It would do so wherever the last reference ends, even at exit.
        """
        works, self._works = list(self._works.values()), {}
        group, self.process_group = self.process_group, None
        if leak or not all(work.is_completed() for work in works):
            for leaked in (group, *works):
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(leaked))


class Groups:
    """The process groups of one strategy, by name.

    Args:
        monitor: waits until all workers have created a group.
        seconds: how long a worker may take to create a group.

    Attributes:
        number: of the strategy.
        end: why the groups were dropped, or None.
    """

    def __init__(self, heartbeats: HeartbeatStore, monitor: MonitoredWait, seconds: float) -> None:
        self.number = heartbeats.next_number()
        self._heartbeats, self._monitor = heartbeats, monitor
        # If this timeout expires, the group is unusable; monitored waits have a shorter one.
        self._timeout = timedelta(seconds=seconds + 60)
        self._groups: dict[str, SequencedGroup] = {}
        self._is_forked = False
        self.end: Exit | None = None
        heartbeats.register(self.number, self)
        reinit_after_fork(self)

    def after_fork(self) -> None:
        """Marks the groups of a forked process, which has none of their threads, as unusable."""
        self._is_forked = True

    def get(self, name: str, words: Callable[[], str]) -> SequencedGroup:
        """Returns a group; all workers create it together at its first use."""
        if name not in self._groups:
            group = SequencedGroup(f"{self.number}/{name}", self._heartbeats)
            op = group.count(words())
            try:
                call = BackgroundCall(partial(self._create, group.name))
                group.process_group = self._monitor.wait(call, lambda: op)
            except BaseException:
                # The other workers must not count on this one in this group.
                self._heartbeats.started.pop(group.name, None)
                raise
            self._groups[name] = group
        return self._groups[name]

    def drop(self, end: Exit) -> None:
        """Publishes why the strategy ends here, and drops all groups; idempotent."""
        if self.end is not None:
            return
        self.end = end
        self._heartbeats.end(self.number, end).wait(_PUBLISH_SECONDS)
        while self._groups:
            self._groups.popitem()[1].drop(leak=self._is_forked)

    def _create(self, name: str) -> Any:
        heartbeats = self._heartbeats
        store = PrefixStore(f"mirror/{name}", heartbeats.store)
        # torch's own wait for missing workers has no timeout to set and does not name them.
        store.set(f"here/{heartbeats.rank}", "")
        keys = [f"here/{rank}" for rank in range(heartbeats.size)]
        pause = _POLL_SECONDS
        while not store.check(keys):
            if self.end is not None:
                raise RuntimeError(f"the strategy has ended: {self.end.words}")
            sleep(pause)
            pause = min(2 * pause, 0.1)
        return dist.ProcessGroupGloo(store, heartbeats.rank, heartbeats.size, self._timeout)
