"""Dispatch: the queue of scheduled steps, and a thread per worker that takes from it.

[Note: Whose turn it is]
Synchronously, a worker that has pushed a gradient for an update would push a second one for the
same, in the place of a worker that is slower. So it gets no step until an update has been made,
unless nobody else could: all others have pushed, too, or are being made anew. Nobody waits inside
a server or a worker, so nothing is stuck when one of them is lost.

[Note: At least once]
A step whose worker is lost goes to the front of the queue, with the same number, which servers
know: what it pushed before counts, and is not counted again.

[Note: One error for all]
Steps that fail beside each other are told of once, as TensorFlow does: steps scheduled before an
error was raised raise no other. Otherwise it would be the clock that says how many errors there
are, and a program that has handled one would meet the next in what it does then.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mirror.errors import ActorDied, ServerLostError, StrategyError, WorkerLostError
from mirror.threads.user_frames import add_note

QUEUE_SIZE = 256 * 1024
"""How many steps may wait; schedule blocks beyond, as TensorFlow's does."""

_MAX_LOSSES = 10  # of workers, by one step: it is the step that ends them
_SECONDS = 5.0  # that the engine may take to tell of a server that a worker cannot reach


@dataclass(eq=False)
class Closure:
    """One scheduled step.

    Attributes:
        number: counts all that were ever scheduled.
        data: its pickle.
        flags: modes of modules when it was scheduled.
        datasets: the indices of per-worker datasets in it.
        attempt: how many workers were lost with it.
        after: how many errors had been raised when it was scheduled.
    """

    number: int
    data: bytes
    flags: list[bool]
    datasets: tuple[int, ...]
    attempt: int = 0
    after: int = 0
    value: Any = None
    error: BaseException | None = None
    ended: threading.Event = field(default_factory=threading.Event)

    def end(self, value: Any = None, error: BaseException | None = None) -> None:
        """Lets who waits for the step go on."""
        self.value, self.error = value, error
        self.data = b""
        self.ended.set()


class ClosureQueue:
    """Steps, on their way from the coordinator to workers and back.

    Args:
        run: runs a step on a worker, and returns its answer's header and its value or error.
        restart: makes a worker anew.
        to_aggregate: of how many gradients a synchronous update is the mean.

    Attributes:
        listeners: each is called with every step that is queued.
    """

    def __init__(
        self,
        num_workers: int,
        run: Callable[[int, Closure, int], tuple[dict[str, Any], Any]],
        restart: Callable[[int], None],
        *,
        to_aggregate: int | None,
        queue_size: int,
    ) -> None:
        self._run, self._restart = run, restart
        self._queue: deque[Closure] = deque()
        self._running: dict[int, Closure] = {}
        self._queue_size = queue_size
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._num_raised = 0
        self._fatal: BaseException | None = None
        self.is_closed = False
        self.listeners: list[Callable[[Closure], None]] = []
        self._up = set(range(num_workers))
        self._is_sync = to_aggregate is not None
        self._share = -(-(to_aggregate or 1) // num_workers)
        self._updates: list[int] = []
        self._pushed = [0] * num_workers
        self.num_scheduled = self.num_ended = self.num_retried = 0
        self._open: set[int] = set()
        for worker in range(num_workers):
            threading.Thread(
                target=self._serve, args=(worker,), name=f"mirror worker {worker}", daemon=True
            ).start()

    # What the coordinator calls

    def put(self, make: Callable[[int], Closure]) -> Closure:
        """Queues a step; waits while the queue is full."""
        with self._changed:
            self.check()
            self._changed.wait_for(lambda: len(self._queue) < self._queue_size or self._is_over())
            self.check()
            step = make(self.num_scheduled)
            step.after = self._num_raised
            self.num_scheduled += 1
            self._open.add(step.number)
            self._queue.append(step)
            for note in self.listeners:
                note(step)
            self._changed.notify_all()
        return step

    def is_busy(self) -> bool:
        """Whether steps wait or run."""
        with self._changed:
            return bool(self._queue or self._running)

    def wait(self) -> None:
        """Returns when no step waits or runs; raises as ``check``."""
        with self._changed:
            self._changed.wait_for(
                lambda: not (self._queue or self._running) or self._fatal is not None
            )
            self.check()

    def check(self) -> None:
        """Raises the error of a step, once; for a lost server, or after ``close``, always."""
        with self._changed:
            if self._fatal is not None:
                raise self._fatal.with_traceback(None)
            if self._error is not None:
                error, self._error = self._error, None
                self._num_raised += 1
                raise error

    def fail(self, error: BaseException) -> None:
        """Ends everything: nothing can run any more."""
        with self._changed:
            if self._fatal is None:
                self._fatal = error
            self._cancel(error)
            for step in self._running.values():
                step.end(error=error)
            self._changed.notify_all()

    def close(self) -> None:
        """Ends the threads; steps that wait are not run."""
        with self._changed:
            self.is_closed = True
        self.fail(StrategyError("the strategy of this coordinator is closed"))

    # A thread of each worker

    def _is_over(self) -> bool:
        return self._fatal is not None or self._error is not None

    def _serve(self, worker: int) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._fatal is not None or self._may_take(worker))
                if self._fatal is not None:
                    return
                step = self._queue.popleft()
                self._running[worker] = step
                done_below = min(self._open, default=0)
                self._changed.notify_all()
            try:
                header, value = self._run(worker, step, done_below)
            except ActorDied:
                self._lose(worker, step)
                continue
            except BaseException as error:
                header, value = {"outcome": "raised"}, error
            if header["outcome"] == "lost" and not self.is_server_gone():
                self._again(worker, step)
                continue
            with self._changed:
                self._record(worker, header)
                self._end(worker, step, header["outcome"], value)

    def _may_take(self, worker: int) -> bool:
        """See [Note: Whose turn it is]."""
        if not self._queue:
            return False
        if not self._is_sync or self._pushed[worker] < self._share:
            return True
        others = self._up - {worker}
        return not self._running and all(self._pushed[k] >= self._share for k in others)

    def _record(self, worker: int, header: dict[str, Any]) -> None:
        if not self._is_sync:
            return
        updates = header.get("updates") or self._updates
        if sum(updates) > sum(self._updates):
            self._updates = list(updates)
            self._pushed = [0] * len(self._pushed)
        if "gathered" in header.get("said", ()) and sum(updates) == sum(self._updates):
            self._pushed[worker] += 1

    def _end(self, worker: int, step: Closure, outcome: str, value: Any) -> None:
        self._running.pop(worker, None)
        self._open.discard(step.number)
        self.num_ended += 1
        if outcome == "returned":
            step.end(value)
        elif not step.ended.is_set():
            add_note(value, f"in step {step.number}, on worker {worker}")
            step.end(error=value)
            if step.after == self._num_raised:
                self._fail(step, value)
        self._changed.notify_all()

    def _fail(self, step: Closure, value: BaseException) -> None:
        """Keeps an error to be raised, and ends what waits; see [Note: One error for all]."""
        if self._error is None:
            self._error = value
        cancelled = StrategyError(
            f"this step was not run, since step {step.number} has raised "
            f"{type(value).__name__}: {value}"
        )
        cancelled.__cause__ = value
        self._cancel(cancelled)

    def _cancel(self, error: BaseException) -> None:
        for step in self._queue:
            self._open.discard(step.number)
            step.end(error=error)
        self._queue.clear()

    def _lose(self, worker: int, step: Closure) -> None:
        with self._changed:
            self._up.discard(worker)
        self._again(worker, step)
        try:
            self._restart(worker)
        except BaseException as error:
            with self._changed:
                is_last = not self._up
            if is_last and not self.is_closed:
                lost = WorkerLostError(
                    f"no worker is left; the last could not be made anew: {error}"
                )
                lost.__cause__ = error
                self.fail(lost)
            return
        with self._changed:
            self._up.add(worker)
            self._pushed[worker] = 0
            self._changed.notify_all()

    def _again(self, worker: int, step: Closure) -> None:
        with self._changed:
            self._running.pop(worker, None)
            step.attempt += 1
            if self._fatal is not None:
                return
            if step.attempt >= _MAX_LOSSES:
                lost = WorkerLostError(
                    f"step {step.number} has ended {step.attempt} workers that ran it; look for "
                    "what it does to its process: memory, signals, os._exit"
                )
                self._end(worker, step, "raised", lost)
                return
            self.num_retried += 1
            self._queue.appendleft(step)
            self._changed.notify_all()

    def is_server_gone(self) -> bool:
        """Whether the engine says, too, that a server is gone, which could not be reached."""
        with self._changed:
            return self._changed.wait_for(
                lambda: isinstance(self._fatal, ServerLostError), timeout=_SECONDS
            )
