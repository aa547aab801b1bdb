"""LockstepStack: a strategy's locksteps, one per depth of nested runs."""

from __future__ import annotations

from collections.abc import Sequence

from mirror.execution.replicas import Replicas
from mirror.threads.lockstep import Lockstep


class LockstepStack(list[Lockstep]):
    """The locksteps by depth of nested runs, created when first needed.

    Args:
        schedule: the schedule of the replicas, see [Note: Turns].
        timeout_seconds: a run fails if no replica moves for so long; ``None``: no limit.
    """

    def __init__(self, replicas: Replicas, schedule: str, timeout_seconds: float | None) -> None:
        self._names, self._break_off = replicas.names, replicas.communicator.abort
        self.schedule, self._timeout_seconds = schedule, timeout_seconds

    def at_depth(self, depth: int) -> Lockstep:
        """Returns the lockstep for a nesting depth; replaces one that an interrupt has hit."""
        while len(self) <= depth:
            self.append(self._make())
        lockstep = self[depth]
        if lockstep.is_busy or not lockstep.usable:
            lockstep.dismiss()
            lockstep = self[depth] = self._make()
        return lockstep

    def close(self) -> None:
        """Ends and joins the threads."""
        for lockstep in self:
            lockstep.close()
        self.clear()

    def abandon_threads(self) -> None:
        """Drops the locksteps in a forked process: the threads exist only in the parent."""
        for lockstep in self:
            lockstep.abandon_threads()
        self.clear()

    def _make(self) -> Lockstep:
        limit = self._timeout_seconds
        lockstep = Lockstep(self._names, schedule=self.schedule, timeout_seconds=limit)
        lockstep.break_off = self._break_off
        return lockstep


def close_threads(locksteps: Sequence[Lockstep]) -> None:
    """Makes the threads of a deleted strategy end at their next wait."""
    for lockstep in locksteps:
        lockstep.dismiss()
