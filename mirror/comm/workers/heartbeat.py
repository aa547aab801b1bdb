"""HeartbeatStore: publishes this worker's status and reads the status of the other workers.

There is one per process, in torch.distributed's store, which lives in worker 0 or its launcher. A
thread writes the status once a second. It reads the other statuses often while a wait is in
progress, and rarely otherwise. No other thread uses the store, because a store in a stopped
process never answers.

[Note: Deadlocks of workers]
Workers start the operations of a group in the same order and count them. A wait
for operation n needs all workers to have started n. A worker that has not is running, and may
come; or has ended, which ends the wait with an error; or waits for another operation.
Rule: a wait may end if all missing workers may come, or if one of them has ended. A worker may
come if it runs, or if one of its waits (one per thread) may end. The remaining workers wait for
each other: a deadlock.

Counts only grow, so statuses read at different moments are enough for a suspicion. It counts as a
deadlock once a second read of all workers shows the same.
"""

from __future__ import annotations

import atexit
import json
import os
import queue
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from time import monotonic, sleep
from typing import Any, NamedTuple

from torch.distributed.distributed_c10d import PrefixStore, Store

from mirror.base.process_bound import reinit_after_fork


class PendingOp(NamedTuple):
    """Operation ``number`` of a process group, for which a worker waits; ``words`` describe it."""

    group: str
    number: int
    words: str


class Exit(NamedTuple):
    """How a strategy, or a program, has ended on a worker.

    Attributes:
        is_loss: whether a lost worker is the reason.
        words: the text for the other workers' messages.
    """

    is_loss: bool
    words: str


@dataclass(frozen=True)
class WorkerStatus:
    """The status of a worker.

    Attributes:
        beat: the number of statuses that it has published.
        line: the user's line that its main thread is at.
        started: the number of operations that it has started, by group.
        waits: the operations that its threads have waited for, for some time.
        ended: the ends of its strategies, by their number.
        num_open: the number of strategies that have not ended.
        end: the end of its program; None while it runs.
        note: a remark for the other workers' messages.
    """

    beat: int = 0
    line: str = ""
    started: dict[str, int] = field(default_factory=dict)
    waits: tuple[PendingOp, ...] = ()
    ended: dict[str, Exit] = field(default_factory=dict)
    num_open: int = 0
    end: Exit | None = None
    note: str = ""

    def to_json(self) -> str:
        """Returns the status as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: bytes) -> WorkerStatus:
        """Returns the status that ``to_json`` encoded."""
        values = json.loads(text)
        values["waits"] = tuple(PendingOp(*op) for op in values["waits"])
        values["ended"] = {number: Exit(*end) for number, end in values["ended"].items()}
        values["end"] = values["end"] and Exit(*values["end"])
        return cls(**values)

    def end_of(self, group: str) -> Exit | None:
        """Returns why this worker starts no more operations of a group, or None if it may."""
        return self.end or self.ended.get(group.partition("/")[0])

    def lacks(self, op: PendingOp) -> bool:
        """Returns whether this worker has not started an operation."""
        return self.started.get(op.group, 0) < op.number

    def describe(self, strategy: str) -> str:
        """Returns the status in words, for messages of a strategy."""
        waits = [op.words for op in self.waits]
        if (end := self.end or self.ended.get(strategy)) is not None:
            text = end.words
        elif waits:
            text = "waits in " + ", and in ".join(waits)
            text += "" if self.line in text else f", at {self.line}"
        else:
            text = f"goes on, last seen at {self.line or 'an unknown line'}"
        return f"{text}; {self.note}" if self.note else text


def find_ended_without(op: PendingOp, statuses: Sequence[WorkerStatus]) -> list[tuple[int, Exit]]:
    """Returns the workers that ended without starting an operation, by rank."""
    ends = []
    for rank, status in enumerate(statuses):
        end = status.end_of(op.group)
        if end is not None and status.lacks(op):
            ends.append((rank, end))
    return ends


def find_deadlocks(statuses: Sequence[WorkerStatus]) -> frozenset[tuple[int, PendingOp]]:
    """Returns the waits that never end, with their ranks; see [Note: Deadlocks of workers]."""
    waits = {(rank, op) for rank, status in enumerate(statuses) for op in status.waits}
    stuck = {rank for rank, _ in waits}

    def may_end(op: PendingOp) -> bool:
        if find_ended_without(op, statuses):
            return True
        late = [rank for rank, status in enumerate(statuses) if status.lacks(op)]
        return stuck.isdisjoint(late)

    while ending := {rank for rank, op in waits if may_end(op)} & stuck:
        stuck -= ending
    return frozenset((rank, op) for rank, op in waits if rank in stuck)


_BEAT_SECONDS, _POLL_SECONDS = 1.0, 0.5
_BEATS_PER_POLL = 10  # while no wait is in progress: the store may be gone at the next wait
# How long worker 0, which hosts the store, waits at exit for the others to read its last status.
_LAST_SECONDS = 3.0
_GONE_SECONDS = 2.0  # worker 0 does not wait for a worker that has been silent for so long
_KEPT_ENDS = 8

# Returns the user's line of an error, or the main thread's line.
LineOf = Callable[[BaseException | None], str]


@dataclass(frozen=True)
class HeartbeatSnapshot:
    """The statuses of all workers, read at one moment.

    Attributes:
        time: of the read, by ``monotonic``.
        statuses: by rank.
        silent_seconds: the time since each worker's last new status, by rank.
    """

    time: float
    statuses: list[WorkerStatus]
    silent_seconds: list[float]


class HeartbeatStore:
    """The status of all workers.

    Args:
        line_of: see ``LineOf``.
        hosts_store: whether worker 0 may host the store, and so waits at its end until the others
            have read its last status.

    Attributes:
        started: the number of operations that this worker has started, by group.
        snapshot: the last read.
        broken: the reason and the time of the store's failure; None while it answers.
        note: a remark on this worker, for the other workers' messages.
        lost: why a worker is lost, if another detector has found that; ends every wait.
    """

    def __init__(
        self, store: Store, rank: int, size: int, line_of: LineOf, *, hosts_store: bool = True
    ) -> None:
        self.store, self.rank, self.size = store, rank, size
        self._own = PrefixStore("mirror/at", _own_connection(store))
        self.line_of = line_of
        self.started: dict[str, int] = {}
        self.snapshot = HeartbeatSnapshot(0.0, [WorkerStatus()] * size, [0.0] * size)
        self.broken: tuple[str, float] | None = None
        self.note = ""
        self.lost: str | None = None
        self._hosts_store = hosts_store
        self._ended: dict[str, Exit] = {}
        self._end: Exit | None = None
        self._beat = self._num_strategies = 0
        self._waits: dict[int, PendingOp] = {}  # by thread
        self._open: dict[str, weakref.ref[Any]] = {}  # the groups of strategies, by number
        # By rank, the last beat and when it was first read.
        self._last_beats: dict[int, tuple[int, float]] = {}
        self._is_forked = False
        # A SimpleQueue, because a finalizer may put into it at any moment.
        self._wakes: queue.SimpleQueue[threading.Event | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="mirror heartbeat", daemon=True)
        self._thread.start()
        atexit.register(self.deregister)
        reinit_after_fork(self)

    def after_fork(self) -> None:
        """Publishes nothing in a forked process, which is not a worker."""
        self._is_forked = True

    def next_number(self) -> str:
        """Returns the number of a new strategy; all workers create strategies in one order."""
        self._num_strategies += 1
        return str(self._num_strategies)

    def register(self, number: str, groups: Any) -> None:
        """Registers the groups of a strategy; ``drop(Exit)`` is called when the program ends."""
        self._open[number] = weakref.ref(groups)
        self._wakes.put(None)

    def end(self, number: str, end: Exit) -> threading.Event:
        """Publishes how a strategy has ended; returns an event that is set when it is published.

        A second end of the same strategy is ignored.
        """
        published = threading.Event()
        # In a forked process the thread is not alive.
        if threading.current_thread() is self._thread or not self._thread.is_alive():
            published.set()
        self._open.pop(number, None)
        self._ended.setdefault(number, end)
        self._wakes.put(published)
        return published

    @contextmanager
    def waiting(self, op: PendingOp) -> Iterator[None]:
        """Publishes, inside ``with``, what this thread waits for, and reads all statuses often."""
        ident = threading.get_ident()
        try:
            self._waits[ident] = op
            self._wakes.put(None)
            yield
        finally:
            self._waits.pop(ident, None)

    def interrupt(self, why: str) -> None:
        """Ends all waits of this process with ``WorkerLostError``; callable in any thread."""
        self.lost = why or "its workers have changed"

    def deregister(self) -> None:
        """Publishes how the program ends, and drops all groups; idempotent."""
        if self._end is not None or self._is_forked:
            return
        self._end = Exit(self.lost is not None, self.lost or self._end_of_program())
        atexit.unregister(self.deregister)
        groups = [reference() for reference in tuple(self._open.values())]
        self._wakes.put(None)
        self._thread.join(_LAST_SECONDS + 1.0)
        for one in groups:
            if one is not None:
                one.drop(self._end)

    def _end_of_program(self) -> str:
        error = getattr(sys, "last_value", None)  # the error that ended the main thread
        if error is None:
            return "has left its program"
        return f"has left its program with {summarize(error)} at {self.line_of(error)}"

    # - In the thread

    def _run(self) -> None:
        try:
            while True:
                published = self._next_wake()
                self._publish()
                if published is not None:
                    published.set()
                if self._end is not None:
                    self._wait_for_readers()
                    return
                if self._waits or (self._open and self._beat % _BEATS_PER_POLL == 1):
                    self.snapshot = self._poll()
        except Exception as error:  # the process with the store is gone
            self.broken = str(error).splitlines()[0], monotonic()

    def _next_wake(self) -> threading.Event | None:
        """Waits until a status is due; returns the event to set once it is published."""
        seconds = _POLL_SECONDS if self._waits else _BEAT_SECONDS if self._open else None
        try:
            return self._wakes.get(timeout=seconds)
        except queue.Empty:
            return None

    def status(self) -> WorkerStatus:
        """Returns the current status of this worker."""
        for number in list(self._ended)[:-_KEPT_ENDS]:
            self._ended.pop(number, None)
        return WorkerStatus(
            self._beat,
            self.line_of(None),
            dict(self.started),
            tuple(self._waits.values()),
            dict(self._ended),
            len(self._open),
            self._end,
            self.note,
        )

    def _publish(self) -> None:
        self._beat += 1
        self._own.set(str(self.rank), self.status().to_json())

    def _poll(self) -> HeartbeatSnapshot:
        for rank in range(self.size):
            if rank not in self._last_beats and self._own.check([str(rank)]):
                self._last_beats[rank] = -1, 0.0
        statuses = [WorkerStatus()] * self.size
        ranks = sorted(self._last_beats)
        texts = self._own.multi_get(list(map(str, ranks))) if ranks else []
        for rank, text in zip(ranks, texts, strict=True):
            status = statuses[rank] = WorkerStatus.from_json(text)
            if self._last_beats[rank][0] != status.beat:
                self._last_beats[rank] = status.beat, monotonic()
        now = monotonic()
        return HeartbeatSnapshot(
            now, statuses, [now - self._last_beats.get(r, (0, now))[1] for r in range(self.size)]
        )

    def _wait_for_readers(self) -> None:
        """Waits in worker 0, which may host the store, until the others have ended as well."""
        by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        if self.rank != 0 or by_agent or not self._hosts_store:
            return
        deadline = monotonic() + _LAST_SECONDS
        while monotonic() < deadline:
            snapshot = self._poll()
            workers = zip(snapshot.statuses, snapshot.silent_seconds, strict=True)
            if not any(
                status.end is None and status.num_open and seconds < _GONE_SECONDS
                for status, seconds in workers
            ):
                return
            sleep(0.05)


def _own_connection(store: Store) -> Store:
    """Returns the store over a separate connection if torch can: a wait blocks a connection."""
    clone: Callable[[], Store] | None = getattr(store, "clone", None)
    try:
        return store if clone is None else clone()
    except (RuntimeError, NotImplementedError):
        return store


def summarize(error: BaseException) -> str:
    """Returns the type of an exception, and the first line of its message."""
    line = (str(error).splitlines() or [""])[0].rstrip(":")
    return f"{type(error).__name__}: {line[:200]}"
