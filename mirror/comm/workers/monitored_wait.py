"""MonitoredWait: a worker waits for other workers in short slices, and reads their status between.

``BackgroundCall`` gives a blocking call the interface of such a wait.

[Note: Monitored waits]
A wait consists of short waits that time out and are repeated; Ctrl-C arrives between two of them.
After the first one the worker publishes its status and reads the statuses of the other workers.
It raises an error in these cases:

    a worker has ended            its strategy or program, without starting this operation
    another detector has found    that a worker is lost: the coordinator of an elastic training
    deadlock                      workers wait for each other: [Note: Deadlocks of workers]
    a connection is broken        the worker that is silent, or hosted the store, is lost
    ``timeout_seconds`` is over   the worker that has been silent longest is lost

An error ends this worker's strategy, and the other workers read that in its status.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from time import monotonic, sleep
from typing import Any, Generic, Protocol, TypeVar

from mirror.comm.workers.heartbeat import (
    Exit,
    HeartbeatSnapshot,
    HeartbeatStore,
    PendingOp,
    WorkerStatus,
    find_deadlocks,
    find_ended_without,
)
from mirror.errors import DivergenceError, MirrorError, WorkerLostError

T = TypeVar("T")

TIMED_OUT = "timed out"  # part of the message if a work is not done yet


class BackgroundCall(Generic[T]):
    """A call in a thread, with the ``wait`` of torch.distributed's works.

    Ctrl-C interrupts this wait; it does not interrupt torch's own blocking calls.

    Attributes:
        error: what the call has raised; None before, and after a success.
    """

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self._result: T
        self.error: BaseException | None = None
        self._thread = threading.Thread(
            target=self._run, name="mirror background call", daemon=True
        )
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result = self._call()
        except BaseException as error:
            self.error = error

    def wait(self, timeout: timedelta) -> T:
        """Waits for the call, and returns its result.

        Raises:
            RuntimeError: the call is not done after ``timeout``; see ``TIMED_OUT``.
            BaseException: the error of the call.
        """
        self._thread.join(timeout.total_seconds())
        if self._thread.is_alive():
            raise RuntimeError(f"the call {TIMED_OUT}")
        if self.error is not None:
            raise self.error
        return self._result


T_co = TypeVar("T_co", covariant=True)

_SLICE_SECONDS = 0.5
# How long the other workers have to report why a connection broke: more than one heartbeat. The
# time starts at the first read after that, because reads are late on a busy machine, and because
# silence shows only at the second read. The second number is the limit.
_REASON_SECONDS, _MAX_REASON_SECONDS = 2.5, 7.5
_RESTART = (
    "this strategy cannot be used any more; end this process, and start all workers again from "
    "the last checkpoint (torchrun --max-restarts does that)"
)


class Waitable(Protocol[T_co]):
    """An operation in flight, such as a work of torch.distributed."""

    def wait(self, timeout: timedelta) -> T_co:
        """Waits for the result; raises RuntimeError with ``TIMED_OUT`` after the timeout."""


class MonitoredWait:
    """Waits for works of a strategy.

    Args:
        seconds: the longest wait.
    """

    def __init__(self, heartbeats: HeartbeatStore, seconds: float) -> None:
        self._heartbeats, self._seconds = heartbeats, seconds
        self._slice = timedelta(seconds=min(_SLICE_SECONDS, max(seconds, 0.001)))

    def wait(self, work: Waitable[T], describe: Callable[[], PendingOp]) -> T:
        """Waits until a work is done; returns its result.

        Args:
            describe: returns the operation; called only if the wait is long.

        Raises:
            DivergenceError: workers wait for each other, or one has ended without this operation.
            WorkerLostError: a worker is gone, or silent.
        """
        try:
            return work.wait(self._slice)
        except RuntimeError as error:
            if not _is_timeout(error):
                raise self._broken_connection(describe(), error) from error
        op = describe()
        start, suspicion = monotonic(), None
        with self._heartbeats.waiting(op):
            while True:
                try:
                    return work.wait(self._slice)
                except RuntimeError as error:
                    if not _is_timeout(error):
                        raise self._broken_connection(op, error) from error
                if self._heartbeats.lost is not None:
                    raise self._lost(op, [], self._heartbeats.lost)
                snapshot = self._heartbeats.snapshot
                if snapshot.time > start:
                    suspicion = self._check_statuses(op, snapshot, suspicion)
                self._check_time(op, start)

    def _check_statuses(self, op: PendingOp, snapshot: HeartbeatSnapshot, suspicion: Any) -> Any:
        """Raises the error that the statuses show.

        A deadlock must show in two statuses of each worker. The first is returned as a suspicion,
        which is the last argument of the next call.
        """
        ended = find_ended_without(op, snapshot.statuses)
        if ended:
            raise self._ended_error(op, snapshot, ended)
        stuck = find_deadlocks(snapshot.statuses)
        if (self._heartbeats.rank, op) not in stuck:
            return None
        ranks = sorted({rank for rank, _ in stuck})
        state = stuck, [snapshot.statuses[rank].started for rank in ranks]
        beats = [snapshot.statuses[rank].beat for rank in ranks]
        if suspicion is None or suspicion[0] != state:
            return state, beats
        if any(beat <= before for beat, before in zip(beats, suspicion[1], strict=True)):
            return suspicion
        raise DivergenceError(
            "all workers must reach the same operations in the same order; they wait for each "
            f"other at different ones:\n{self._describe_all(op, snapshot.statuses)}\n{_RESTART}"
        )

    def _check_time(self, op: PendingOp, start: float) -> None:
        """Raises WorkerLostError if the store is gone, or if the wait took too long."""
        waited, heartbeats = monotonic() - start, self._heartbeats
        if heartbeats.broken is not None:
            reason, time = heartbeats.broken
            if monotonic() - time > _REASON_SECONDS:
                raise self._lost(op, [0], f"the store, in its process, is gone: {reason}")
        if waited < self._seconds:
            return
        snapshot = heartbeats.snapshot
        others = set(range(heartbeats.size)) - {heartbeats.rank}
        limit = max(waited / 2, _REASON_SECONDS)
        unread = monotonic() - max(snapshot.time, start)
        if unread > limit:
            raise self._lost(op, [0], "the store, in its process, does not answer")
        if unread > waited / 2:  # a read is late, on a busy machine
            return
        silent = sorted(rank for rank in others if snapshot.silent_seconds[rank] > limit)
        if silent:
            seconds = min(snapshot.silent_seconds[rank] for rank in silent)
            why = f"nothing was heard of it for {seconds:.0f} s, and timeout_seconds="
            raise self._lost(op, silent, f"{why}{self._seconds:g}")
        late = sorted(rank for rank in others if snapshot.statuses[rank].lacks(op))
        raise self._lost(op, late, f"it has not come within timeout_seconds={self._seconds:g}")

    def _broken_connection(self, op: PendingOp, error: RuntimeError) -> MirrorError:
        """Returns the error for a broken connection, once the statuses show the reason."""
        start, heartbeats, first = monotonic(), self._heartbeats, None
        with heartbeats.waiting(op):
            while heartbeats.broken is None and monotonic() < start + _MAX_REASON_SECONDS:
                snapshot = heartbeats.snapshot
                if snapshot.time > start:
                    ended = find_ended_without(op, snapshot.statuses)
                    if ended:
                        return self._ended_error(op, snapshot, ended)
                    first = first or snapshot.time
                    if snapshot.time - first > 0.75 * _REASON_SECONDS:
                        break
                if heartbeats.lost is not None:
                    return self._lost(op, [], heartbeats.lost)
                sleep(0.02)
        words = _shorten_gloo_error(str(error))
        if heartbeats.broken is not None:
            return self._lost(op, [0], f"the store, in its process, is gone, and: {words}")
        seconds_by_rank = enumerate(heartbeats.snapshot.silent_seconds)
        silent = [rank for rank, seconds in seconds_by_rank if seconds > _REASON_SECONDS / 2]
        if not silent and heartbeats.size == 2:
            silent = [1 - heartbeats.rank]
        return self._lost(op, silent, words)

    def _ended_error(
        self, op: PendingOp, snapshot: HeartbeatSnapshot, ended: Sequence[tuple[int, Exit]]
    ) -> MirrorError:
        """Returns the error for workers that ended without starting an operation."""
        lines = f"\n{self._describe_all(op, snapshot.statuses)}\n{_RESTART}"
        names = _worker_names([rank for rank, _ in ended], self._heartbeats.size)
        if any(end.is_loss for _, end in ended):
            return WorkerLostError(f"a worker is lost, says {names}:{lines}")
        return DivergenceError(
            f"all workers must reach the same operations; {names} will not come any more, and "
            f"worker {self._heartbeats.rank} waits:{lines}"
        )

    def _lost(self, op: PendingOp, ranks: Sequence[int], why: str) -> WorkerLostError:
        names = _worker_names(ranks, self._heartbeats.size) if ranks else "a worker"
        lines = self._describe_all(op, self._heartbeats.snapshot.statuses)
        return WorkerLostError(f"{names} is lost: {why}\n{lines}\n{_RESTART}")

    def _describe_all(self, op: PendingOp, statuses: Sequence[WorkerStatus]) -> str:
        """Returns a line per worker with its status; this worker waits for ``op``."""
        number = op.group.partition("/")[0]
        lines = [status.describe(number) for status in statuses]
        own = replace(self._heartbeats.status(), waits=(op,), end=None, ended={})
        lines[self._heartbeats.rank] = own.describe(number)
        return line_per_worker(lines)


def line_per_worker(texts: Sequence[str]) -> str:
    """Returns a line per worker with its rank and its text."""
    size = len(texts)
    return "\n".join(f"  worker {rank} of {size}: {text}" for rank, text in enumerate(texts))


def _worker_names(ranks: Sequence[int], size: int) -> str:
    return " and ".join(f"worker {rank} of {size}" for rank in ranks)


def _shorten_gloo_error(text: str) -> str:
    """Returns the first line of a message of gloo, without its source line and its advice."""
    line = text.splitlines()[0].partition(" This is typically")[0]
    return re.sub(r"^\[[^]]*\.cc:\d+\] ", "", line)


def _is_timeout(error: RuntimeError) -> bool:
    return TIMED_OUT in str(error).lower()
