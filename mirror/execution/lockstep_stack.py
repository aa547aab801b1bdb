"""Locksteps: the replicas' threads of a strategy, for runs and for runs inside runs."""

from __future__ import annotations

from collections.abc import Sequence

from mirror.execution.replicas import Replicas
from mirror.threads.lockstep import Lockstep


class LockstepStack(list[Lockstep]):
    """The locksteps, by depth of runs inside runs, made when first needed.

    Args:
        schedule: how replicas take turns, see [Note: Turns].
        timeout_seconds: how long no replica may move before a run fails; ``None``: for ever.
    """

    def __init__(self, replicas: Replicas, schedule: str, timeout_seconds: float | None) -> None:
        self._names, self._break_off = replicas.names, replicas.communicator.abort
        self.schedule, self._timeout_seconds = schedule, timeout_seconds

    def at_depth(self, depth: int) -> Lockstep:
        """Returns the one for runs inside that many others, anew if an interrupt has struck it."""
        while len(self) <= depth:
            self.append(self._make())
        lockstep = self[depth]
        if lockstep.is_busy or not lockstep.usable:
            lockstep.dismiss()
            lockstep = self[depth] = self._make()
        return lockstep

    def close(self) -> None:
        """Ends the threads and waits for that."""
        for lockstep in self:
            lockstep.close()
        self.clear()

    def abandon_threads(self) -> None:
        """Drops them in a forked process, whose threads are in the other one."""
        for lockstep in self:
            lockstep.abandon_threads()
        self.clear()

    def _make(self) -> Lockstep:
        made = Lockstep(self._names, schedule=self.schedule, timeout_seconds=self._timeout_seconds)
        made.break_off = self._break_off
        return made


def close_threads(locksteps: Sequence[Lockstep]) -> None:
    """Has the threads end, of a strategy that is gone, when they next wait."""
    for lockstep in locksteps:
        lockstep.dismiss()
