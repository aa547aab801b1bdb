"""The threads of replicas, the gates at which they wait for their turn, and who runs them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TypeVar

from mirror.errors import StrategyError
from mirror.threads.baton import Baton
from mirror.threads.user_frames import calls

T = TypeVar("T")


class ReplicaThreads:
    """One thread per replica, made when first needed; one replica may use the caller's.

    Args:
        names: of the replicas.
        work: what a replica's thread does, given its id; it ends when ``wait`` says so.

    Attributes:
        caller: the thread that runs the replicas.
        here: the replica that has the caller's thread, ``None`` if none does.
        dismissed: whether every thread is to end when it next waits for its turn.
    """

    def __init__(self, names: Sequence[str], work: Callable[[int], None]) -> None:
        self.caller = threading.current_thread()
        self.here: int | None = None
        self.dismissed = False
        self._names, self._work = names, work
        self._turns, self._turn_here = [Baton() for _ in names], Baton()
        self._threads: dict[int, threading.Thread] = {}

    def wake(self, replica_id: int, *, near: bool) -> None:
        """Lets a replica that waits for its turn go on, in a new thread if it has none.

        Args:
            near: whether it is to go on where the calling thread is. See [Note: Waking up].
        """
        if replica_id not in self._threads and replica_id != self.here:
            self._start(replica_id)
        gate = self._turn_here if replica_id == self.here else self._turns[replica_id]
        gate.post(near=near)

    def wait_for_run(self, replica_id: int) -> bool:
        """Waits, in a replica's own thread, for its first turn in a run.

        Does not read ``here``: the next run may have set it already, while this thread still ends
        the last one.

        Returns:
            Whether there is a turn: not if dismissed.
        """
        return self._turns[replica_id].wait() and not self.dismissed

    def wait(self, replica_id: int) -> bool:
        """Waits, inside a run, for a replica's next turn; returns False if dismissed."""
        gate = self._turn_here if replica_id == self.here else self._turns[replica_id]
        return gate.wait() and not self.dismissed

    def threads_of(self, replica_id: int) -> threading.Thread:
        """Returns the thread that a replica is in."""
        return self.caller if replica_id == self.here else self._threads[replica_id]

    def begun(self, replica_ids: Iterable[int]) -> list[threading.Thread]:
        """Returns the threads that replicas are in, without those that are being started."""
        here, caller = self.here, self.caller  # another thread may ask, while a run changes them
        found = [caller if r == here else self._threads.get(r) for r in replica_ids]
        return [thread for thread in found if thread is not None]

    def all(self) -> list[threading.Thread]:
        """Returns the threads that have been made."""
        return list(self._threads.values())

    def close(self) -> None:
        """Ends the threads and waits for that; idempotent. Not while a run is going on."""
        self.dismiss()
        for thread in self.all():
            if thread.is_alive():  # an interrupt may have kept it from starting
                thread.join()

    def dismiss(self) -> None:
        """Has every thread, and who waits in the caller's, end when it next waits for its turn."""
        self.dismissed = True
        for gate in (self._turn_here, *(self._turns[r] for r in tuple(self._threads))):
            with suppress(RuntimeError):  # the gate is open already
                gate.post(near=False)

    def move_back(self) -> None:
        """Gives the caller's thread its affinity back, if an interrupt has prevented that."""
        self._turn_here.move_back()

    def _start(self, replica_id: int) -> None:
        name = f"mirror {self._names[replica_id]}"
        thread = threading.Thread(target=self._work, args=(replica_id,), name=name, daemon=True)
        self._threads[replica_id] = thread
        thread.start()


class ExclusiveRun:
    """The right of one thread to run the replicas of a strategy."""

    def __init__(self) -> None:
        self._claims: dict[str, int] = {}

    def call(self, run: Callable[[], T]) -> T:
        """Calls ``run`` unless another thread's call is going on.

        Raises:
            StrategyError: it is.
        """
        thread = threading.get_ident()
        claims = self._claims
        try:
            # One step, whoever comes at the same moment. A claim of its own an interrupt has left.
            claimed = claims.setdefault("run", thread)
            if claimed != thread:
                if self in calls(claimed, ExclusiveRun.call):
                    raise StrategyError(
                        "run was called while another thread's run of the same strategy is going "
                        "on; call it when that has returned, or give each thread a strategy of "
                        "its own"
                    )
                claims["run"] = thread  # so it has left that, too
            return run()
        finally:
            if claims.get("run") == thread:
                claims.clear()
