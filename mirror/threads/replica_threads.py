"""The threads of replicas, the batons on which they wait, and the right to run them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TypeVar

from mirror.threads.baton import Baton

T = TypeVar("T")


class ReplicaThreads:
    """One thread per replica, started when first needed; one replica may use the caller's.

    Args:
        names: the replicas' names.
        work: the body of a replica's thread, called with the replica id; it returns once
            ``wait_for_run`` returns False.

    Attributes:
        caller: the thread that called ``run``.
        here: the replica that runs in the caller's thread, ``None`` if none does.
        dismissed: whether every thread ends when it next waits for its turn.
    """

    def __init__(self, names: Sequence[str], work: Callable[[int], None]) -> None:
        self.caller = threading.current_thread()
        self.here: int | None = None
        self.dismissed = False
        self._names, self._work = names, work
        self._turns, self._turn_here = [Baton() for _ in names], Baton(is_of_caller=True)
        self._threads: dict[int, threading.Thread] = {}

    def wake(self, replica_id: int, *, near: bool) -> None:
        """Wakes a replica that waits for its turn, in a new thread if it has none.

        Args:
            near: whether it continues on the CPU of the calling thread. See [Note: Waking up].
        """
        if replica_id not in self._threads and replica_id != self.here:
            self._start(replica_id)
        baton = self._turn_here if replica_id == self.here else self._turns[replica_id]
        baton.post(near=near)

    def wait_for_run(self, replica_id: int) -> bool:
        """Waits, in a replica's own thread, for its first turn in a run.

        Does not read ``here``: the next run may have set it already while this thread still
        finishes the last run.

        Returns:
            Whether there is a turn; False if dismissed.
        """
        return self._turns[replica_id].wait() and not self.dismissed

    def wait(self, replica_id: int) -> bool:
        """Waits, inside a run, for a replica's next turn; returns False if dismissed."""
        baton = self._turn_here if replica_id == self.here else self._turns[replica_id]
        return baton.wait() and not self.dismissed

    def threads_of(self, replica_id: int) -> threading.Thread:
        """Returns the thread of a replica."""
        return self.caller if replica_id == self.here else self._threads[replica_id]

    def begun(self, replica_ids: Iterable[int]) -> list[threading.Thread]:
        """Returns the threads of replicas, without threads that are still being started."""
        in_caller, caller = self.here, self.caller  # a snapshot: a run may change them meanwhile
        found = [caller if r == in_caller else self._threads.get(r) for r in replica_ids]
        return [thread for thread in found if thread is not None]

    def all(self) -> list[threading.Thread]:
        """Returns the threads that have been created."""
        return list(self._threads.values())

    def close(self) -> None:
        """Ends and joins the threads; idempotent. Must not be called during a run."""
        self.dismiss()
        for thread in self.all():
            if thread.is_alive():  # an interrupt may have kept it from starting
                thread.join()

    def dismiss(self) -> None:
        """Makes every replica, also one in the caller's thread, end at its next wait."""
        self.dismissed = True
        for baton in (self._turn_here, *(self._turns[r] for r in tuple(self._threads))):
            with suppress(RuntimeError):  # it is posted already
                baton.post(near=False)

    def move_back(self) -> None:
        """Restores the affinity of the caller's thread if an interrupt has prevented that."""
        self._turn_here.move_back()

    def _start(self, replica_id: int) -> None:
        name = f"mirror {self._names[replica_id]}"
        thread = threading.Thread(target=self._work, args=(replica_id,), name=name, daemon=True)
        self._threads[replica_id] = thread
        thread.start()
