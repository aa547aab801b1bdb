"""MonitoredWait: a worker waits for other workers in short slices, and reads their status between.

``BackgroundCall`` gives a blocking call the interface of such a wait.

[Note: Nobody hangs]
A wait consists of short waits that can time out and be repeated; Ctrl-C arrives between two of
them. After the first one the worker publishes its status, and reads the status of the others:

    another worker has ended    its strategy or program, without starting this operation: raises
    deadlock                    workers wait for each other: [Note: Who waits in vain]
    a connection is broken      a worker that is silent, or that hosted the store, is lost
    ``timeout_seconds`` is over the worker that has been silent longest is lost

After an error this worker's strategy is over, and the other workers read that in its status.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from time import monotonic, sleep
from typing import Any, Generic, Protocol, TypeVar

from mirror.comm.workers.heartbeat import HeartbeatSnapshot, HeartbeatStore
from mirror.comm.workers.worker_status import (
    PendingOp,
    WorkerStatus,
    ended_without,
    find_deadlocks,
)
from mirror.errors import DivergenceError, MirrorError, WorkerLostError

T = TypeVar("T")

TIMED_OUT = "timed out"  # what the errors of works that are not done yet have in their words


class BackgroundCall(Generic[T]):
    """A call in a thread, with the ``wait`` of torch.distributed's works.

    Ctrl-C interrupts this wait; it does not interrupt torch's own calls that wait for processes.
    """

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self._result: T
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="mirror errand", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result = self._call()
        except BaseException as error:
            self._error = error

    def wait(self, timeout: timedelta) -> T:
        """Returns what the call has returned.

        Raises:
            RuntimeError: it has not returned yet, see ``TIMED_OUT``.
            BaseException: what it has raised.
        """
        self._thread.join(timeout.total_seconds())
        if self._thread.is_alive():
            raise RuntimeError(f"the call {TIMED_OUT}")
        if self._error is not None:
            raise self._error
        return self._result


T_co = TypeVar("T_co", covariant=True)

_SLICE_SECONDS = 0.5
# How long the other workers have to report why a connection broke: more than one heartbeat. The
# time starts at the first read after that, because reads are late on a busy machine and silence
# takes two reads to see. The second number is the limit.
_REASON_SECONDS, _MOST_REASON_SECONDS = 2.5, 7.5
_RESTART = (
    "the strategy is of no more use here; end this process, and start all workers again from the "
    "last checkpoint (torchrun --max-restarts does that)"
)


class Waitable(Protocol[T_co]):
    """What can be waited for: a work of torch.distributed."""

    def wait(self, timeout: timedelta) -> T_co:
        """Returns when it is done; RuntimeError, with ``TIMED_OUT`` in it, when the time is."""


class MonitoredWait:
    """Waits for works of a strategy.

    Args:
        seconds: for how long, at most.
    """

    def __init__(self, board: HeartbeatStore, seconds: float) -> None:
        self._board, self._seconds = board, seconds
        self._slice = timedelta(seconds=min(_SLICE_SECONDS, max(seconds, 0.001)))

    def wait(self, work: Waitable[T], wait_of: Callable[[], PendingOp]) -> T:
        """Waits until a work is done; returns its result.

        Args:
            wait_of: tells what is waited for; asked when it takes long.

        Raises:
            DivergenceError: the others are, or have ended, where this never ends.
            WorkerLostError: one of them is gone, or silent.
        """
        try:
            return work.wait(self._slice)
        except RuntimeError as error:
            if not _is_late(error):
                raise self._broken(wait_of(), error) from error
        wait = wait_of()
        begun, suspicion = monotonic(), None
        with self._board.waiting(wait):
            while True:
                try:
                    return work.wait(self._slice)
                except RuntimeError as error:
                    if not _is_late(error):
                        raise self._broken(wait, error) from error
                look = self._board.look
                if look.at > begun:
                    suspicion = self._checked(wait, look, suspicion)
                self._check_time(wait, begun)

    def _checked(self, wait: PendingOp, look: HeartbeatSnapshot, suspicion: Any) -> Any:
        """Raises what a look tells; returns what looks bad, to be looked at once more."""
        ended = ended_without(wait, look.positions)
        if ended:
            raise self._error_of_ended(wait, look, ended)
        stuck = find_deadlocks(look.positions)
        if (self._board.rank, wait) not in stuck:
            return None
        ranks = sorted({rank for rank, _ in stuck})
        seen = stuck, [look.positions[rank].begun for rank in ranks]
        beats = [look.positions[rank].beat for rank in ranks]
        if suspicion is None or suspicion[0] != seen:
            return seen, beats
        if any(beat <= before for beat, before in zip(beats, suspicion[1], strict=True)):
            return suspicion
        raise DivergenceError(
            "all workers must reach the same operations in the same order; they wait for each "
            f"other at different ones:\n{self._error_of(wait, look.positions)}\n{_RESTART}"
        )

    def _check_time(self, wait: PendingOp, begun: float) -> None:
        waited, board = monotonic() - begun, self._board
        if board.broken is not None and monotonic() - board.broken[1] > _REASON_SECONDS:
            raise self._lost(wait, [0], f"the store, in its process, is gone: {board.broken[0]}")
        if waited < self._seconds:
            return
        look, others = board.look, set(range(board.size)) - {board.rank}
        if look.at < monotonic() - waited / 2:
            raise self._lost(wait, [0], "the store, in its process, does not answer")
        long = max(waited / 2, _REASON_SECONDS)
        silent = sorted(rank for rank in others if look.silent[rank] > long)
        if silent:
            seconds = min(look.silent[rank] for rank in silent)
            why = f"nothing was heard of it for {seconds:.0f} s, and timeout_seconds="
            raise self._lost(wait, silent, f"{why}{self._seconds:g}")
        late = sorted(rank for rank in others if look.positions[rank].lacks(wait))
        raise self._lost(wait, late, f"it has not come within timeout_seconds={self._seconds:g}")

    def _broken(self, wait: PendingOp, error: RuntimeError) -> MirrorError:
        """Returns what is behind an error of torch's: what the others say, or do not any more."""
        begun, board, first = monotonic(), self._board, None
        with board.waiting(wait):
            while board.broken is None and monotonic() < begun + _MOST_REASON_SECONDS:
                look = board.look
                if look.at > begun:
                    ended = ended_without(wait, look.positions)
                    if ended:
                        return self._error_of_ended(wait, look, ended)
                    first = first or look.at
                    if look.at - first > 0.75 * _REASON_SECONDS:
                        break
                sleep(0.02)
        words = _of_gloo(str(error))
        if board.broken is not None:
            return self._lost(wait, [0], f"the store, in its process, is gone, and: {words}")
        silent = [
            r for r, seconds in enumerate(board.look.silent) if seconds > _REASON_SECONDS / 2
        ]
        if not silent and board.size == 2:
            silent = [1 - board.rank]
        return self._lost(wait, silent, words)

    def _error_of_ended(
        self, wait: PendingOp, look: HeartbeatSnapshot, ended: Sequence[Any]
    ) -> MirrorError:
        told = f"\n{self._error_of(wait, look.positions)}\n{_RESTART}"
        who = _named([rank for rank, _ in ended], self._board.size)
        if any(end.is_loss for _, end in ended):
            return WorkerLostError(f"a worker is lost, says {who}:{told}")
        return DivergenceError(
            f"all workers must reach the same operations; {who} will not come any more, and "
            f"worker {self._board.rank} waits:{told}"
        )

    def _lost(self, wait: PendingOp, ranks: Sequence[int], why: str) -> WorkerLostError:
        who = _named(ranks, self._board.size) if ranks else "a worker"
        told = self._error_of(wait, self._board.look.positions)
        return WorkerLostError(f"{who} is lost: {why}\n{told}\n{_RESTART}")

    def _error_of(self, wait: PendingOp, positions: Sequence[WorkerStatus]) -> str:
        number = wait.link.partition("/")[0]
        where = [position.where(number) for position in positions]
        mine = self._board.position()
        where[self._board.rank] = replace(mine, waits=(wait,), end=None, ended={}).where(number)
        return listed(where)


def listed(words: Sequence[str]) -> str:
    """Returns a line per worker."""
    size = len(words)
    return "\n".join(f"  worker {rank} of {size}: {told}" for rank, told in enumerate(words))


def _named(ranks: Sequence[int], size: int) -> str:
    return " and ".join(f"worker {rank} of {size}" for rank in ranks)


def _of_gloo(words: str) -> str:
    """Returns what an error of gloo's says, without where in gloo that is, and its advice."""
    said = words.splitlines()[0].partition(" This is typically")[0]
    return re.sub(r"^\[[^]]*\.cc:\d+\] ", "", said)


def _is_late(error: RuntimeError) -> bool:
    return TIMED_OUT in str(error).lower()
