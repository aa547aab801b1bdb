"""Readers of steps: ahead of use in a background thread, or on demand."""

from __future__ import annotations

import contextvars
import os
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from mirror.base.bitwise import same_values
from mirror.data.distributed_steps import DistributedStep, DistributedSteps
from mirror.data.rng_state import TorchDraws, capture_rng

# The time that a consumer that stops waits for a loader in the middle of a batch, in seconds.
DRAIN_SECONDS = 5.0

_CPU = torch.device("cpu")


class Closed(Exception):
    """The reader was closed while the consumer waited."""


class OnDemand:
    """Reads each step on demand, in the consumer's thread."""

    def __init__(self, steps: DistributedSteps) -> None:
        self.steps = steps

    def start(self) -> None:
        """Nothing to do."""

    def take(self) -> DistributedStep:
        """Returns the next step."""
        return next(self.steps)

    def has_next(self) -> bool | None:
        """Returns ``None``: the next step is not read yet."""
        return None

    def stop(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Ends the pass, and frees the dataset's batches."""
        self.steps.end()

    @property
    def was_left(self) -> bool:
        """Whether steps were read ahead that no consumer will take."""
        return False


class Prefetcher:
    """Keeps up to ``depth`` steps ready, read by a background thread for one consumer thread.

    The thread reads while fewer than ``depth`` steps are ready. It reads steps that draw random
    numbers only while the consumer waits; see ``rng_state.py``. It ends with the pass, at
    an error (the consumer may continue after it), by ``stop``, which keeps the ready steps, or by
    ``close``. The condition ``_changed`` guards the attributes below it.
    """

    def __init__(self, steps: DistributedSteps, depth: int) -> None:
        self.steps = steps
        self._depth = depth
        self._changed = threading.Condition()
        self._ready: deque[DistributedStep | BaseException] = deque()
        self._thread: threading.Thread | None = None
        self._is_demanded = False  # the consumer waits, and nothing is ready
        self._is_reading = False  # the thread has not ended
        self._is_stopping = False
        self._is_closed = False
        self._is_over = False
        self._was_left = False
        self._reads_ahead = False
        self._has_drawn = False
        self._process = os.getpid()

    def start(self) -> None:
        """Starts the thread, or continues it after ``stop``."""
        self._check_process()
        with self._changed:
            self._is_stopping = False
            if not (self._is_reading or self._is_over or self._is_closed):
                self._is_reading = True
                consumer = _ConsumerState()
                self._thread = threading.Thread(
                    target=contextvars.copy_context().run,
                    args=(self._work, consumer),
                    name="mirror input",
                    daemon=True,  # a loader that never returns must not keep the process alive
                )
                self._thread.start()

    def take(self) -> DistributedStep:
        """Returns the next step, in the order of the pass.

        Raises:
            StopIteration: the pass is over.
            Closed: the reader is closed, also while this call waits.
            BaseException: the error that the dataset raised at this step, with its traceback.
        """
        self._check_process()
        with self._changed:
            if not self._ready:
                self.start()
                self._is_demanded = True
                self._changed.notify_all()
                try:
                    while not self._ready:
                        if self._is_over:
                            raise StopIteration
                        if self._is_closed:
                            raise Closed
                        self._changed.wait()
                finally:
                    self._is_demanded = False
            outcome = self._ready.popleft()
            self._changed.notify_all()
        if isinstance(outcome, DistributedStep):
            return outcome
        self._join()
        try:
            raise outcome
        finally:
            del outcome  # its traceback holds this frame: a reference cycle

    def has_next(self) -> bool | None:
        """Returns whether another step, or an error, follows; ``None`` if it is not read yet."""
        with self._changed:
            if self._ready:
                return not isinstance(self._ready[0], StopIteration)
            return False if self._is_over else None

    def stop(self) -> None:
        """Ends the thread, and keeps the steps that it has read; no effect in a forked process."""
        if os.getpid() != self._process:
            return  # the thread does not exist in this process, and may have held the lock
        with self._changed:
            self._is_stopping = True
            self._changed.notify_all()
        self._join()

    def close(self) -> None:
        """Ends the thread and the pass, and frees the ready steps. Idempotent."""
        is_first, self._is_closed = not self._is_closed, True
        self.stop()
        if os.getpid() == self._process:
            if is_first:
                is_taken = self._is_over and not self._ready
                self._was_left = not (self._is_reading or is_taken)
            self._release()

    @property
    def was_left(self) -> bool:
        """Whether it was closed before its consumer took the whole pass, and the thread ended."""
        return self._was_left

    def _join(self) -> None:
        thread = self._thread
        # The garbage collector may close an iterator in any thread, this one included.
        if thread is not None and thread is not threading.current_thread():
            thread.join(DRAIN_SECONDS)

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise RuntimeError(
                "an iterator of a distributed dataset works only in the process that created it; "
                "this process is a fork; iterate over the dataset again"
            )

    # - the reading thread

    def _work(self, consumer: _ConsumerState) -> None:
        try:
            with consumer.apply(), TorchDraws(self._await_demand):
                while self._await_turn():
                    if not self._deliver(self._read()):
                        return
        except BaseException as error:  # a bug here must not leave the consumer waiting
            self._deliver(error)
        finally:
            self._release()

    def _deliver(self, outcome: DistributedStep | BaseException) -> bool:
        """Delivers a step or an error to the consumer; returns whether to continue."""
        with self._changed:
            self._ready.append(outcome)
            self._is_demanded = False  # set here, since the consumer may wake up late
            if not isinstance(outcome, DistributedStep):
                self._is_over = isinstance(outcome, StopIteration)
                self._is_reading = False
            self._changed.notify_all()
        return isinstance(outcome, DistributedStep)

    def _await_turn(self) -> bool:
        with self._changed:
            while not self._is_stopping:
                has_room = self._reads_ahead and len(self._ready) < self._depth
                if self._is_demanded or has_room:
                    return True
                self._changed.wait()
            self._is_reading = False
            return False

    def _read(self) -> DistributedStep | BaseException:
        on_demand = not self._reads_ahead
        before = capture_rng() if on_demand else None
        self._has_drawn = False
        try:
            return next(self.steps)
        except BaseException as error:
            return error
        finally:
            if before is not None and not same_values(before, capture_rng()):
                self._has_drawn = True
            self._reads_ahead = not self._has_drawn and not self.steps.must_wait

    def _await_demand(self) -> None:
        """Waits in the middle of a read, before a draw, until the consumer asks for the step."""
        self._has_drawn = True
        with self._changed:
            while not self._is_demanded and not self._is_stopping:
                self._changed.wait()
            if self._is_closed:
                raise _ReadCancelled  # before the draw, as if the read had not started

    def _release(self) -> None:
        """Ends the pass if the thread has ended, and the pass is over or closed."""
        with self._changed:
            if not self._is_reading and (self._is_closed or self._is_over):
                if self._is_closed:
                    self._ready.clear()
                self.steps.end()


class _ReadCancelled(BaseException):
    """Cancels a read of a closed reader; not an Exception, since loaders may catch these."""


class _ConsumerState:
    """The thread-local modes of the consumer's thread: grad, inference, default device."""

    def __init__(self) -> None:
        self.grad = torch.is_grad_enabled()
        self.inference = torch.is_inference_mode_enabled()
        self.device = torch.get_default_device()

    @contextmanager
    def apply(self) -> Iterator[None]:
        with ExitStack() as stack:
            if self.inference:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(self.grad))
            if self.device != _CPU:
                stack.enter_context(self.device)
            yield
