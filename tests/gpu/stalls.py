"""Stalls: a replica that blocks in a call of CUDA lets the others go on.

A thread that waits for a GPU holds no GIL, and waits for as long as the GPU works. So under
"staggered" the next replica begins meanwhile, and the replicas that have begun go on. Here the
wait is over when no other replica of the run can go on: each has ended, or waits at a merge point
or in a stall of its own that began later. So replicas pass the interpreter on at these calls, in
an order that no clock decides, and all that they share is seen in every state that one leaves it
in at such a call.

A replica that waits for a lock of the program looks like one that computes; the stalls of the
others end after ``LONGEST_SECONDS`` then.
"""

from __future__ import annotations

import threading
from time import monotonic

from mirror.execution.run import current
from mirror.threads.lockstep import Lockstep

LONGEST_SECONDS = 0.5
_LOOK_SECONDS = 0.001


class Stalls:
    """The replicas, of all runs, that are in a call that blocks.

    Attributes:
        num: how often a replica has let others go on.
        threads: those that are in a call that blocks, by identifier.
    """

    def __init__(self) -> None:
        self.num, self.threads = 0, set[int]()
        self._under_way: list[tuple[Lockstep, int]] = []  # the longest first

    def stall(self) -> None:
        """Lets the other replicas of the calling one's run go on, if they need not take turns."""
        replica = current.replica
        if replica is None:
            return
        lockstep = replica.run.lockstep
        if lockstep.takes_turns or not isinstance(lockstep, Lockstep):
            return
        this, never = (lockstep, replica.replica_id), threading.Lock()
        self.num += 1
        self._under_way.append(this)
        self.threads.add(threading.get_ident())
        try:
            with never:
                deadline = monotonic() + LONGEST_SECONDS
                while not self._is_over(*this) and monotonic() < deadline:
                    never.acquire(timeout=_LOOK_SECONDS)  # one instruction, for the detector
        finally:
            self.threads.discard(threading.get_ident())
            self._under_way.remove(this)

    def _is_over(self, lockstep: Lockstep, replica_id: int) -> bool:
        queue = lockstep._queue
        if lockstep._is_over():
            return True
        stalled = [r for of, r in tuple(self._under_way) if of is lockstep]
        is_next = stalled[0] == replica_id and queue.running.issubset(stalled)
        return is_next and not queue.runnable
