"""Reading steps: ahead of use in a background thread, or when they are asked for."""

from __future__ import annotations

import contextvars
import os
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from mirror.data.distributed_steps import DistributedStep, DistributedSteps
from mirror.data.rng_state import TorchDraws, capture_streams, same_streams

# How long a consumer that leaves waits for a loader that is in the middle of a batch.
DRAIN_SECONDS = 5.0

_CPU = torch.device("cpu")


class Closed(Exception):
    """The reading was ended while the consumer waited."""


class OnDemand:
    """Reads each step when it is asked for, in the consumer's thread."""

    def __init__(self, steps: DistributedSteps) -> None:
        self.steps = steps

    def start(self) -> None:
        """Nothing to do."""

    def take(self) -> DistributedStep:
        """Returns the next step."""
        return next(self.steps)

    def has_next(self) -> bool | None:
        """Whether there is another step, ``None``: nobody knows yet."""
        return None

    def stop(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Lets go of the dataset."""
        self.steps.end()

    @property
    def was_left(self) -> bool:
        """Whether something was read ahead that nobody will take."""
        return False


class Prefetcher:
    """Keeps up to ``depth`` steps ready, read by a thread that lives while somebody consumes.

    One thread consumes. The thread reads on if fewer than ``depth`` steps are ready, and what
    must be read on demand when the consumer waits for it; see [Note: Draws of a loader]. It ends
    with the pass, at an error (the consumer may go on after it), by ``stop``, which keeps what is
    ready, or by ``close``. Everything below is guarded by ``_changed``.
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
        """Starts the thread, or lets it go on."""
        self._check_process()
        with self._changed:
            self._is_stopping = False
            if not (self._is_reading or self._is_over or self._is_closed):
                self._is_reading = True
                caller = _CallersState()
                self._thread = threading.Thread(
                    target=contextvars.copy_context().run,
                    args=(self._work, caller),
                    name="mirror input",
                    daemon=True,  # a loader that never returns must not keep the process alive
                )
                self._thread.start()

    def take(self) -> DistributedStep:
        """Returns the next step, in the order of the pass.

        Raises:
            StopIteration: the pass is over.
            Closed: by ``close``, also while this call waits.
            BaseException: what the dataset raised instead of this step, with its traceback.
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
            del outcome  # it would hold this frame, which holds it

    def has_next(self) -> bool | None:
        """Whether there is another step, or an error in its place; ``None``: it is not read."""
        with self._changed:
            if self._ready:
                return not isinstance(self._ready[0], StopIteration)
            return False if self._is_over else None

    def stop(self) -> None:
        """Ends the thread, and keeps what it has read; does nothing in a forked process."""
        if os.getpid() != self._process:
            return  # the thread is not in this process, and may have held the lock
        with self._changed:
            self._is_stopping = True
            self._changed.notify_all()
        self._join()

    def close(self) -> None:
        """Ends the thread and lets go of the dataset and of what is ready; idempotent."""
        is_first, self._is_closed = not self._is_closed, True
        self.stop()
        if os.getpid() == self._process:
            if is_first:
                is_taken = self._is_over and not self._ready
                self._was_left = not (self._is_reading or is_taken)
            self._release()

    @property
    def was_left(self) -> bool:
        """Whether it was closed before its consumer had got the whole pass, and nothing reads."""
        return self._was_left

    def _join(self) -> None:
        thread = self._thread
        # The garbage collector may end an iterator anywhere, in the thread itself, too.
        if thread is not None and thread is not threading.current_thread():
            thread.join(DRAIN_SECONDS)

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise RuntimeError(
                "an iterator of a distributed dataset serves the process it was made in; this "
                "one is a fork; iterate over the dataset anew"
            )

    # The thread.

    def _work(self, caller: _CallersState) -> None:
        try:
            with caller.applied(), TorchDraws(self._await_demand):
                while self._await_turn():
                    if not self._hand_over(self._read()):
                        return
        except BaseException as error:  # our own: it must not leave the consumer waiting
            self._hand_over(error)
        finally:
            self._release()

    def _hand_over(self, outcome: DistributedStep | BaseException) -> bool:
        """Gives the consumer what was read; returns whether to go on."""
        with self._changed:
            self._ready.append(outcome)
            self._is_demanded = False  # here: the consumer may be slow to wake up
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
        before = capture_streams() if on_demand else None
        self._has_drawn = False
        try:
            return next(self.steps)
        except BaseException as error:
            return error
        finally:
            if before is not None and not same_streams(before, capture_streams()):
                self._has_drawn = True
            self._reads_ahead = not self._has_drawn and not self.steps.must_wait

    def _await_demand(self) -> None:
        """Called in the middle of a read, before a draw."""
        self._has_drawn = True
        with self._changed:
            while not self._is_demanded and not self._is_stopping:
                self._changed.wait()
            if self._is_closed:
                raise _Abandoned  # nothing drawn, as if this batch had not been begun

    def _release(self) -> None:
        """Ends the pass, once nobody reads it or will."""
        with self._changed:
            if not self._is_reading and (self._is_closed or self._is_over):
                if self._is_closed:
                    self._ready.clear()
                self.steps.end()


class _Abandoned(BaseException):
    """Ends a read that nobody waits for; not an Exception, which loaders may catch."""


class _CallersState:
    """What holds in the consumer's thread and not by itself in others."""

    def __init__(self) -> None:
        self.grad = torch.is_grad_enabled()
        self.inference = torch.is_inference_mode_enabled()
        self.device = torch.get_default_device()

    @contextmanager
    def applied(self) -> Iterator[None]:
        with ExitStack() as stack:
            if self.inference:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(self.grad))
            if self.device != _CPU:
                stack.enter_context(self.device)
            yield
