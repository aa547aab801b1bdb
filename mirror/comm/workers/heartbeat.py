"""HeartbeatStore: publishes this worker's status and reads the status of the other workers.

There is one per process, in torch.distributed's store, which lives in worker 0 or its launcher. A
thread writes the status once a second. It reads the others' often while a wait is in progress,
else rarely. No other thread uses the store, because a store in a stopped process never answers.
"""

from __future__ import annotations

import atexit
import os
import queue
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic, sleep
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore, Store

from mirror.base.at_fork import reinit_after_fork
from mirror.comm.workers.worker_status import Exit, PendingOp, WorkerStatus

_BEAT_SECONDS, _LOOK_SECONDS = 1.0, 0.5
_BEATS_PER_LOOK = 10  # while no wait is in progress: the store may be gone at the next wait
# How long worker 0, which hosts the store, waits at exit for the others to read its last status.
_LAST_SECONDS = 3.0
_GONE_SECONDS = 2.0  # worker 0 does not wait for a worker that has been silent for so long
_KEPT_ENDS = 8

# Returns the user's line of an error, or the main thread's line.
LineOf = Callable[[BaseException | None], str]


@dataclass(frozen=True)
class HeartbeatSnapshot:
    """What was read of all at one moment.

    Attributes:
        at: when, by ``monotonic``.
        positions: by rank.
        silent: for how many seconds each has said nothing.
    """

    at: float
    positions: list[WorkerStatus]
    silent: list[float]


class HeartbeatStore:
    """The status of all workers.

    Args:
        line_of: see ``LineOf``.

    Attributes:
        begun: by link, the number of operations that this worker has started.
        look: the last read, while a wait is in progress.
        broken: the reason and the time of the store's failure; ``None`` while it answers.
        note: a further note on this worker.
    """

    def __init__(self, store: Store, rank: int, size: int, line_of: LineOf) -> None:
        self.store, self.rank, self.size = store, rank, size
        self._own = PrefixStore("mirror/at", _another(store))
        self.line_of = line_of
        self.begun: dict[str, int] = {}
        self.look = HeartbeatSnapshot(0.0, [WorkerStatus()] * size, [0.0] * size)
        self.broken: tuple[str, float] | None = None
        self.note = ""
        self._ended: dict[str, Exit] = {}
        self._end: Exit | None = None
        self._beat = self._num_strategies = 0
        self._waits: dict[int, PendingOp] = {}  # by thread
        self._open: dict[str, weakref.ref[Any]] = {}  # what the strategies have, by number
        self._heard: dict[int, tuple[int, float]] = {}  # the last beats, and when they were new
        self._is_forked = False
        # May be put into by a finalizer, in whatever this thread is just doing.
        self._wakes: queue.SimpleQueue[threading.Event | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._go_on, name="mirror board", daemon=True)
        self._thread.start()
        atexit.register(self.deregister)
        reinit_after_fork(self)

    def after_fork(self) -> None:
        """Says nothing in a forked process, which is no worker."""
        self._is_forked = True

    def number(self) -> str:
        """Returns the number of a strategy that is being made; all workers make them in order."""
        self._num_strategies += 1
        return str(self._num_strategies)

    def keep(self, number: str, links: Any) -> None:
        """Notes what a strategy has: it is dropped, by ``drop(End)``, with the program."""
        self._open[number] = weakref.ref(links)
        self._wakes.put(None)

    def end(self, number: str, end: Exit) -> threading.Event:
        """Says how a strategy has come to its end, the first time; returns what tells when."""
        said = threading.Event()
        # In a forked process it is not alive.
        if threading.current_thread() is self._thread or not self._thread.is_alive():
            said.set()
        self._open.pop(number, None)
        self._ended.setdefault(number, end)
        self._wakes.put(said)
        return said

    @contextmanager
    def waiting(self, wait: PendingOp) -> Iterator[None]:
        """Says meanwhile what this thread waits for, and reads what the others say."""
        ident = threading.get_ident()
        try:
            self._waits[ident] = wait
            self._wakes.put(None)
            yield
        finally:
            self._waits.pop(ident, None)

    def deregister(self) -> None:
        """Says that the program ends, and how; idempotent."""
        if self._end is not None or self._is_forked:
            return
        self._end = Exit(is_loss=False, words=self._end_of_program())
        links = [known() for known in tuple(self._open.values())]
        self._wakes.put(None)
        self._thread.join(_LAST_SECONDS + 1.0)
        for one in links:
            if one is not None:
                one.drop(self._end)

    def _end_of_program(self) -> str:
        error = getattr(sys, "last_value", None)  # what has ended the main thread
        if error is None:
            return "has left its program"
        return f"has left its program with {summarize(error)} at {self.line_of(error)}"

    # In the thread.

    def _go_on(self) -> None:
        try:
            while True:
                told = self._next_wake()
                self._publish()
                if told is not None:
                    told.set()
                if self._end is not None:
                    self._see_others_off()
                    return
                if self._waits or (self._open and self._beat % _BEATS_PER_LOOK == 1):
                    self.look = self._poll()
        except Exception as error:  # the process that has the store is gone
            self.broken = str(error).splitlines()[0], monotonic()

    def _next_wake(self) -> threading.Event | None:
        """Waits until there is something to say."""
        seconds = _LOOK_SECONDS if self._waits else _BEAT_SECONDS if self._open else None
        try:
            return self._wakes.get(timeout=seconds)
        except queue.Empty:
            return None

    def position(self) -> WorkerStatus:
        """Returns where this worker stands."""
        for number in list(self._ended)[:-_KEPT_ENDS]:
            self._ended.pop(number, None)
        return WorkerStatus(
            self._beat,
            self.line_of(None),
            dict(self.begun),
            tuple(self._waits.values()),
            dict(self._ended),
            len(self._open),
            self._end,
            self.note,
        )

    def _publish(self) -> None:
        self._beat += 1
        self._own.set(str(self.rank), self.position().to_json())

    def _poll(self) -> HeartbeatSnapshot:
        unknown = [str(rank) for rank in range(self.size) if rank not in self._heard]
        for rank in map(int, unknown):
            if self._own.check([str(rank)]):
                self._heard[rank] = -1, 0.0
        positions = [WorkerStatus()] * self.size
        known = sorted(self._heard)
        said = self._own.multi_get(list(map(str, known))) if known else []
        for rank, text in zip(known, said, strict=True):
            heard = positions[rank] = WorkerStatus.from_json(text)
            if self._heard[rank][0] != heard.beat:
                self._heard[rank] = heard.beat, monotonic()
        now = monotonic()
        return HeartbeatSnapshot(
            now, positions, [now - self._heard.get(r, (0, now))[1] for r in range(self.size)]
        )

    def _see_others_off(self) -> None:
        """Waits for others to have read how worker 0's program has ended, and to end, too."""
        if self.rank != 0 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            return
        deadline = monotonic() + _LAST_SECONDS
        while monotonic() < deadline:
            look = self._poll()
            every = zip(look.positions, look.silent, strict=True)
            if not any(
                position.end is None and position.num_open and silent < _GONE_SECONDS
                for position, silent in every
            ):
                return
            sleep(0.05)


def _another(store: Store) -> Store:
    """Returns the same store by a connection of its own, where torch can: who waits has one."""
    clone: Callable[[], Store] | None = getattr(store, "clone", None)
    try:
        return store if clone is None else clone()
    except (RuntimeError, NotImplementedError):
        return store


def summarize(error: BaseException) -> str:
    """Returns what an exception is, and the first line of what it says."""
    words = (str(error).splitlines() or [""])[0].rstrip(":")
    return f"{type(error).__name__}: {words[:200]}"
