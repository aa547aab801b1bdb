"""NullLockstep: stands for the lockstep where one thread computes for all replicas."""

from __future__ import annotations

from mirror.concurrency.merge_point import MergePoint
from mirror.concurrency.pace import TurnTimer
from mirror.errors import StrategyError


class NullLockstep:
    """The lockstep of what a backward pass outside ``run`` recomputes of one replica's part."""

    takes_turns, is_eager, pace = True, False, TurnTimer()

    def let_next_begin(self, replica_id: int) -> None:
        """Does nothing: there is no next one."""

    def check_going_on(self) -> None:
        """Does nothing: there is no other one that could fail."""

    def merge(self, replica_id: int, point: MergePoint) -> object:
        """Refuses: nobody can wait here."""
        raise StrategyError(
            f"{point} cannot wait for the other replicas in a backward pass outside "
            "strategy.run, where one thread goes through all of them; call backward inside run, "
            "or keep it out of what activation checkpointing recomputes, and out of the backward "
            "of a custom function"
        )
