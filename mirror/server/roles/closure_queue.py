"""The queue of scheduled steps, one thread per worker that takes steps from it, and their results.

In a synchronous update, a fast worker could push a second gradient in place of a slow worker's.
So after a push a worker gets no step until the update has been made, unless no other worker can
contribute: each has pushed too, or is being restarted. The wait is here, not inside a server or a
worker, so nothing hangs when one of these is lost.

If a worker is lost, its step goes to the front of the queue and keeps its number. Servers know
the number, so what the step pushed before is counted once.

If several running steps fail, only one error is raised, as in TensorFlow: a step that was
scheduled before an error was raised raises no second one. Otherwise the number of errors would
depend on timing, and a program that handled one would meet the next at an unrelated call.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mirror.base.process_bound import NoCopy
from mirror.errors import ActorDied, ServerLostError, StrategyError, WorkerLostError
from mirror.server.shard import PushResult
from mirror.threads.user_frames import add_note

QUEUE_SIZE = 256 * 1024
"""The number of steps that may wait; with more, schedule blocks, as TensorFlow's does."""

_MAX_ATTEMPTS = 10  # a step that has ended this many workers is not run again
# After a worker reports an unreachable server, the engine may need this long to notice its end.
_SERVER_DEATH_SECONDS = 5.0


@dataclass(eq=False)
class Closure:
    """One scheduled step.

    Attributes:
        number: the index among all steps of the strategy.
        data: the pickle; empty once the step has ended.
        flags: the modes of the model when the step was scheduled; see ``Model.flags``.
        datasets: the indices of the per-worker datasets in it.
        attempt: the number of workers that were lost with it.
        after: the number of errors that had been raised when the step was scheduled.
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
        """Stores the result, and wakes the threads that wait for it."""
        self.value, self.error = value, error
        self.data = b""
        self.ended.set()


class ClosureQueue:
    """Queues steps, runs them on free workers, and runs them again if a worker is lost.

    Args:
        run: runs a step on a worker; returns the header of its answer, and its value or error.
        restart: restarts a worker.
        to_aggregate: the number of gradients in a synchronous update, or None.

    Attributes:
        listeners: functions that are called with each step that is queued.
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

    # - Called by the coordinator's thread

    def put(self, make: Callable[[int], Closure]) -> Closure:
        """Queues a step, and returns it; waits while the queue is full.

        Args:
            make: returns the step for its number.
        """
        with self._changed:
            self.check()
            self._changed.wait_for(
                lambda: (
                    len(self._queue) < self._queue_size
                    or self._fatal is not None
                    or self._error is not None
                )
            )
            self.check()
            step = make(self.num_scheduled)
            step.after = self._num_raised
            self.num_scheduled += 1
            self._open.add(step.number)
            self._queue.append(step)
            for listener in self.listeners:
                listener(step)
            self._changed.notify_all()
        return step

    def is_busy(self) -> bool:
        """Returns whether steps wait or run."""
        with self._changed:
            return bool(self._queue or self._running)

    def wait(self) -> None:
        """Waits until no step waits or runs; raises as ``check``."""
        with self._changed:
            self._changed.wait_for(
                lambda: not (self._queue or self._running) or self._fatal is not None
            )
            self.check()

    def check(self) -> None:
        """Raises a step's error once, and the error of a lost server or of ``close`` each time."""
        with self._changed:
            if self._fatal is not None:
                raise self._fatal.with_traceback(None)
            if self._error is not None:
                error, self._error = self._error, None
                self._num_raised += 1
                raise error

    def fail(self, error: BaseException) -> None:
        """Ends all steps with an error; no step can run any more."""
        with self._changed:
            if self._fatal is None:
                self._fatal = error
            self._cancel(error)
            for step in self._running.values():
                step.end(error=error)
            self._changed.notify_all()

    def close(self) -> None:
        """Ends the threads; queued steps are not run."""
        with self._changed:
            self.is_closed = True
        self.fail(StrategyError("the strategy of this coordinator is closed"))

    # - One thread per worker

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
                self._requeue(worker, step)
                continue
            with self._changed:
                self._record(worker, header)
                self._end(worker, step, header["outcome"], value)

    def _may_take(self, worker: int) -> bool:
        """Returns whether a worker gets the next step: one gradient per worker and update."""
        if not self._queue:
            return False
        if not self._is_sync or self._pushed[worker] < self._share:
            return True
        rest = self._up - {worker}
        return not self._running and all(self._pushed[k] >= self._share for k in rest)

    def _record(self, worker: int, header: dict[str, Any]) -> None:
        if not self._is_sync:
            return
        updates = header.get("updates") or self._updates
        if sum(updates) > sum(self._updates):
            self._updates = list(updates)
            self._pushed = [0] * len(self._pushed)
        if PushResult.GATHERED in header.get("results", ()) and sum(updates) == sum(self._updates):
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
        """Stores an error for ``check``, and cancels queued steps."""
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
        self._requeue(worker, step)
        try:
            self._restart(worker)
        except BaseException as error:
            with self._changed:
                is_last = not self._up
            if is_last and not self.is_closed:
                lost = WorkerLostError(
                    f"no worker is left; the last could not be restarted: {error}"
                )
                lost.__cause__ = error
                self.fail(lost)
            return
        with self._changed:
            self._up.add(worker)
            self._pushed[worker] = 0
            self._changed.notify_all()

    def _requeue(self, worker: int, step: Closure) -> None:
        with self._changed:
            self._running.pop(worker, None)
            step.attempt += 1
            if self._fatal is not None:
                return
            if step.attempt >= _MAX_ATTEMPTS:
                lost = WorkerLostError(
                    f"step {step.number} has ended {step.attempt} workers that ran it; check what "
                    "it does to its process: memory, signals, os._exit"
                )
                self._end(worker, step, "raised", lost)
                return
            self.num_retried += 1
            self._queue.appendleft(step)
            self._changed.notify_all()

    def is_server_gone(self) -> bool:
        """Waits for the engine's notice that a server has ended; returns whether it came."""
        with self._changed:
            return self._changed.wait_for(
                lambda: isinstance(self._fatal, ServerLostError), timeout=_SERVER_DEATH_SECONDS
            )


class RemoteValue(NoCopy):
    """The result of a step that a coordinator has scheduled, once the step has ended.

    The result is stored in this process, so it outlives the worker.
    """

    _instead = "fetch it: coordinator.fetch(value)"

    def __init__(self, step: Closure) -> None:
        self._step = step

    def fetch(self) -> Any:
        """Waits for the step and returns its result.

        Raises:
            BaseException: the error of the step; ServerLostError if a server is lost;
                StrategyError if the step was not run, since another step raised.
        """
        self._step.ended.wait()
        if self._step.error is not None:
            raise self._step.error
        return self._step.value

    get = fetch

    def done(self) -> bool:
        """Returns whether the step has ended."""
        return self._step.ended.is_set()

    def __repr__(self) -> str:
        step = self._step
        state = "waits or runs" if not step.ended.is_set() else "has ended"
        if step.error is not None:
            state = f"has raised {type(step.error).__name__}"
        return f"RemoteValue(step {step.number}, which {state})"
