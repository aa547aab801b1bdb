"""Readers of the steps of a pass: on demand, ahead of use, and together with other workers.

``OnDemand`` reads in the consumer's thread, and ``Prefetcher`` in a background thread. Where there
are several workers, one of two readers wraps that one, so that all workers take the steps of a
pass together, and end it together.

``AgreedBatches``: workers with their own batches may have different numbers of them. A worker that
runs out continues with empty batches until all workers have ended, since the other workers wait
for it in collectives. If every dataset has a certain length, the number of steps is known before
the pass.

Otherwise the workers tell each other at each step whether they have another one. This happens when
the consumer asks, in the order of the program, never in the reading threads: these end at
different batches when a loop ends early, and several passes may be read at once. To save the wait,
a worker announces during each step whether the next one is already read. The workers exchange
again only if one of them did not know.

``SameBatches``: workers that read the same global batches only compare the first batch of a pass
before its use.
"""

from __future__ import annotations

import contextvars
import os
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch

from mirror.base.bitwise import same_values
from mirror.comm.workers.worker_group import LocalWorkerGroup
from mirror.data.distributed_steps import DistributedStep, DistributedSteps
from mirror.data.loader_copy import WindowBatch
from mirror.data.rng_state import TorchDraws, capture_rng
from mirror.data.worker_sharding import batch_hash
from mirror.errors import BatchError, DivergenceError
from mirror.values import leaves_of

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


_PLAN = struct.Struct("<q?")
_UNKNOWN = -1


class BatchReader(Protocol):
    """Reads the steps of a pass."""

    steps: DistributedSteps

    def start(self) -> None:
        """Starts to read ahead."""

    def take(self) -> DistributedStep:
        """Returns the next step; raises ``StopIteration`` after the last."""

    def has_next(self) -> bool | None:
        """Returns whether there is another step; ``None`` if that is not known yet."""

    def stop(self) -> None:
        """Stops to read ahead, and keeps the steps that were read."""

    def close(self) -> None:
        """Ends the pass, and frees the dataset's batches."""

    @property
    def was_left(self) -> bool:
        """Whether steps were read ahead that no consumer will take."""


def max_num_steps(workers: LocalWorkerGroup, num_steps: int | None) -> int | None:
    """Returns the largest number of steps of a worker's dataset; ``None`` unless all are known."""
    own = _UNKNOWN if num_steps is None else num_steps
    replies = workers.exchange("distribute_dataset", payload=lambda: _PLAN.pack(own, False))
    counts = [_PLAN.unpack(one)[0] for one in replies]
    return None if _UNKNOWN in counts else max(counts)


class _WrappedReader:
    """The base of readers that wrap another reader."""

    def __init__(self, reader: BatchReader) -> None:
        self._reader = reader
        self.steps = reader.steps
        self.start = reader.start
        self.has_next = reader.has_next
        self.stop = reader.stop
        self.close = reader.close

    @property
    def was_left(self) -> bool:
        return self._reader.was_left


class SameBatches(_WrappedReader):
    """Reads the same batches on all workers, and checks the first one.

    Args:
        order: the state that decides the order of the pass.
        num_batches: the number of the dataset's batches; ``None`` if it is unknown.
    """

    def __init__(
        self,
        reader: BatchReader,
        workers: LocalWorkerGroup,
        order: Mapping[str, Any],
        num_batches: int | None,
    ) -> None:
        super().__init__(reader)
        self._workers = workers
        causes = order["streams"]["torch"], [order.get("generators"), order.get("samplers")]
        self._facts: list[object] = [*causes, num_batches]
        self._has_begun = self._has_ended = False

    def take(self) -> DistributedStep:
        """Returns the next step.

        Raises:
            DivergenceError: the batches differ from another worker's.
        """
        try:
            step = self._reader.take()
        except StopIteration:
            self._compare(None)
            if not self._has_ended:
                self._has_ended = True
                self._workers.exchange("the end of the batches of a distributed dataset")
            raise
        self._compare(step)
        return step

    def _compare(self, step: DistributedStep | None) -> None:
        if self._has_begun:
            return
        self._has_begun = True
        batches = None if step is None else list(map(_identity, step.batches))
        facts = [*self._facts, batches]
        replies = self._workers.exchange(
            "the first batch of a pass over a distributed dataset",
            payload=lambda: b"".join(map(batch_hash, facts)),
        )
        size = len(replies[0]) // len(_WHAT)
        # Different generators are no error if the batches are equal all the same.
        if all(one[2 * size :] == replies[0][2 * size :] for one in replies):
            return
        differ = [
            f"{what} of worker {w}"
            for w, one in enumerate(replies)
            for k, what in enumerate(_WHAT)
            if one[k * size : (k + 1) * size] != replies[0][k * size : (k + 1) * size]
        ]
        raise DivergenceError(
            "all workers must read the same global batches, of which each takes its part; "
            f"{', '.join(differ)} {'differs' if len(differ) == 1 else 'differ'} from worker 0's; "
            "use the same seed on all workers (torch.manual_seed, and the loader's generator) and "
            "the same dataset; if only some examples draw random numbers, load them in worker "
            "processes, num_workers >= 1; or let each worker read its own batches, "
            "InputOptions(sharding='off')"
        )


_WHAT = (
    "the state of torch's random generator",
    "the loader's samplers and generators",
    "the number of batches",
    "the first batch",
)


class AgreedBatches(_WrappedReader):
    """Reads each worker's own batches, then empty ones until all workers have ended.

    Args:
        num_left: the number of this worker's steps; ``None`` if it is unknown.
        sample: a step from which empty ones are made, if this worker has no other.
        reads_ahead: whether the next step may be read already during a step.
        drops_remainder: whether to drop a last step of fewer examples than the first one.

    Raises:
        BatchError: a worker has no batch at all.
    """

    def __init__(
        self,
        reader: BatchReader,
        workers: LocalWorkerGroup,
        num_left: int | None,
        *,
        sample: DistributedStep | None,
        reads_ahead: bool,
        drops_remainder: bool,
    ) -> None:
        super().__init__(reader)
        self._workers = workers
        self._drops_remainder = drops_remainder
        self._announces = reads_ahead and not drops_remainder
        self._held: tuple[DistributedStep, int] | None = None
        self._pending_answer: Callable[[], list[int]] | None = None
        self._empty: DistributedStep | None = None
        self._record(sample)
        own = _UNKNOWN if num_left is None else num_left
        replies = workers.exchange(
            "the start of a pass over a distributed dataset",
            (drops_remainder, self._announces),
            lambda: _PLAN.pack(own, num_left == 0 and self._empty is None),
        )
        plans = [_PLAN.unpack(one) for one in replies]
        self._left: int | None = None
        if not drops_remainder and all(count != _UNKNOWN for count, _ in plans):
            self._left = max(count for count, _ in plans)
            if self._left:
                self._check([is_bare for _, is_bare in plans])

    def take(self) -> DistributedStep:
        """Returns the next step; an empty one if only other workers have another.

        Raises:
            StopIteration: no worker has another step.
            BatchError: a worker has had no step, or more steps than its dataset's length.
        """
        held, self._held = self._held, None
        step, total = held or self._next()
        if self._drops_remainder:
            if self.steps.first_size is None:
                self.steps.first_size = total
            elif total < self.steps.first_size:
                self._held = self._next()  # raises StopIteration if the step was the last
        return step

    def _next(self) -> tuple[DistributedStep, int]:
        answers, self._pending_answer = self._pending_answer, None
        known = answers() if answers is not None else [_UNKNOWN]
        try:
            own: DistributedStep | None = self._reader.take()
        except StopIteration:
            own = None
        self._record(own)
        total = 0
        if self._left is not None:
            self._count(own)
        elif _UNKNOWN in known:
            total = self._ask(own)
        elif not any(known):
            raise StopIteration
        if own is None:
            assert self._empty is not None
            own = self._empty.empty()
        if self._left is None and self._announces:
            self._exchange()
        return own, total

    def _exchange(self) -> None:
        """Announces to all workers whether this worker has another step."""
        has_next = self._reader.has_next()
        known = _UNKNOWN if has_next is None else int(has_next)
        self._pending_answer = self._workers.all_gather_int(
            "whether a distributed dataset has another batch", known
        )

    def _count(self, own: DistributedStep | None) -> None:
        """Counts a step of a pass with a known end; raises ``StopIteration`` after the last."""
        if self._left:
            self._left -= 1
            return
        if own is None:
            raise StopIteration
        raise BatchError(
            "a dataset must yield as many batches as its len() says; worker "
            f"{self._workers.rank}'s has more, and the other workers have ended"
        )

    def _ask(self, own: DistributedStep | None) -> int:
        """Returns the number of examples of all workers.

        Raises:
            StopIteration: no worker has another step.
        """
        num_examples = _UNKNOWN if own is None else own.num_examples()
        replies = self._workers.exchange(
            "the next batch of a distributed dataset",
            payload=lambda: _PLAN.pack(num_examples, self._empty is None),
        )
        answers = [_PLAN.unpack(one) for one in replies]
        if all(count == _UNKNOWN for count, _ in answers):
            raise StopIteration
        self._check([is_bare for _, is_bare in answers])
        return sum(count for count, _ in answers if count != _UNKNOWN)

    def _record(self, step: DistributedStep | None) -> None:
        if step is not None and self._empty is None:
            self._empty = step.empty()

    def _check(self, bare: Sequence[bool]) -> None:
        if any(bare):
            without = ", ".join(str(w) for w, is_bare in enumerate(bare) if is_bare)
            raise BatchError(
                "a worker without remaining batches continues with empty ones, made from an "
                f"earlier batch; worker {without} has had none; give every worker at least one "
                "batch, or all the same dataset, with InputOptions(sharding='data')"
            )


def _identity(batch: Any) -> object:
    """Returns the value that identifies a batch in the comparison of workers."""
    return batch.key if isinstance(batch, WindowBatch) else leaves_of(batch)
