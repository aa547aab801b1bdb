"""Agreement: several workers take the steps of a pass together, and end it together.

[Note: Ends of workers]
Workers with batches of their own may have unlike numbers of them, and who has none left must go on
with empty batches, or the others wait for it. Which is known before the pass where everybody's
dataset tells its length; otherwise all say at each step whether they have another. That happens
when the consumers ask, in the order of the program, and not in the threads that read ahead: these
do not end at the same batch when a loop is left, and several passes are read side by side. But who
gets a step begins to tell whether the next one is read already, which arrives during the step;
only if somebody did not know do all wait for each other.

Where all read the same global batches they need to tell nothing; but whether they are the same is
compared once a pass, before the first batch is used.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from mirror.comm.workers.worker_group import LocalWorkerGroup
from mirror.data.batch_hash import batch_hash
from mirror.data.distributed_steps import DistributedStep, DistributedSteps
from mirror.data.worker_slices import Fetched
from mirror.errors import BatchError, DivergenceError
from mirror.values import leaves_of

_PLAN = struct.Struct("<q?")
_UNKNOWN = -1


class BatchReader(Protocol):
    """What gives the steps of a pass."""

    steps: DistributedSteps

    def start(self) -> None:
        """Lets it read ahead."""

    def take(self) -> DistributedStep:
        """Returns the next step; ``StopIteration`` after the last."""

    def has_next(self) -> bool | None:
        """Whether there is another step, ``None``: nobody knows yet."""

    def stop(self) -> None:
        """Ends what reads ahead, and keeps what was read."""

    def close(self) -> None:
        """Lets go of the dataset."""

    @property
    def was_left(self) -> bool:
        """Whether something was read ahead that nobody will take."""


def longest(workers: LocalWorkerGroup, num_steps: int | None) -> int | None:
    """Returns the most steps of any worker's dataset, ``None`` unless all are known."""
    own = _UNKNOWN if num_steps is None else num_steps
    said = workers.exchange("distribute_dataset", payload=lambda: _PLAN.pack(own, False))
    counts = [_PLAN.unpack(one)[0] for one in said]
    return None if _UNKNOWN in counts else max(counts)


class _Around:
    """A reader over another one."""

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


class SameBatches(_Around):
    """Reads the same batches on all workers, and finds out if they are others.

    Args:
        order: what decides the order of the pass.
        num_batches: the dataset's, ``None`` where it does not tell.
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
        self._told: list[object] = [*causes, num_batches]
        self._has_begun = self._has_ended = False

    def take(self) -> DistributedStep:
        """Returns the next step.

        Raises:
            DivergenceError: the batches are not the same as another worker's.
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
        told = [*self._told, None if step is None else list(map(_shown, step.batches))]
        said = self._workers.exchange(
            "the first batch of a pass over a distributed dataset",
            payload=lambda: b"".join(map(batch_hash, told)),
        )
        size = len(said[0]) // len(_WHAT)
        # What the order follows from need not be alike if nothing follows from it.
        if all(one[2 * size :] == said[0][2 * size :] for one in said):
            return
        differ = [
            f"{what} of worker {w}"
            for w, one in enumerate(said)
            for k, what in enumerate(_WHAT)
            if one[k * size : (k + 1) * size] != said[0][k * size : (k + 1) * size]
        ]
        raise DivergenceError(
            "all workers must read the same global batches, of which each takes its part; "
            f"{', '.join(differ)} {'is' if len(differ) == 1 else 'are'} not as worker 0's; seed "
            "all workers alike (torch.manual_seed, and the loader's generator) and give them the "
            "same dataset; examples that draw random numbers only now and then are drawn by "
            "worker processes, num_workers >= 1; or give each worker batches of its own, "
            "InputOptions(sharding='off')"
        )


_WHAT = (
    "the state of torch's random generator",
    "the loader's samplers and generators",
    "the number of batches",
    "the first batch",
)


class AgreedBatches(_Around):
    """Reads each worker's own batches, and goes on with empty ones until all have ended.

    Args:
        num_left: how many steps this worker has, ``None`` if unknown.
        sample: what to make an empty step of, if this worker has none.
        reads_ahead: whether it may be known during a step that there is another one.
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
        self._tells = reads_ahead and not drops_remainder
        self._held: tuple[DistributedStep, int] | None = None
        self._told: Callable[[], list[int]] | None = None
        self._empty: DistributedStep | None = None
        self._record(sample)
        own = _UNKNOWN if num_left is None else num_left
        said = workers.exchange(
            "the start of a pass over a distributed dataset",
            (drops_remainder, self._tells),
            lambda: _PLAN.pack(own, num_left == 0 and self._empty is None),
        )
        plans = [_PLAN.unpack(one) for one in said]
        self._left: int | None = None
        if not drops_remainder and all(count != _UNKNOWN for count, _ in plans):
            self._left = max(count for count, _ in plans)
            if self._left:
                self._check([is_bare for _, is_bare in plans])

    def take(self) -> DistributedStep:
        """Returns the next step, an empty one if only others have another.

        Raises:
            StopIteration: no worker has another.
            BatchError: a worker has had none, or more than its dataset has told.
        """
        held, self._held = self._held, None
        step, total = held or self._next()
        if self._drops_remainder:
            if self.steps.first_size is None:
                self.steps.first_size = total
            elif total < self.steps.first_size:
                self._held = self._next()  # or it was the last
        return step

    def _next(self) -> tuple[DistributedStep, int]:
        told, self._told = self._told, None
        known = told() if told is not None else [_UNKNOWN]
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
        if self._left is None and self._tells:
            self._exchange()
        return own, total

    def _exchange(self) -> None:
        """Begins to tell whether there is another step here."""
        has_next = self._reader.has_next()
        known = _UNKNOWN if has_next is None else int(has_next)
        self._told = self._workers.all_gather_int(
            "whether a distributed dataset has another batch", known
        )

    def _count(self, own: DistributedStep | None) -> None:
        """Counts a step of those that are left; raises ``StopIteration`` after the last."""
        if self._left:
            self._left -= 1
            return
        if own is None:
            raise StopIteration
        raise BatchError(
            "a dataset must give as many batches as its len() tells; worker "
            f"{self._workers.rank}'s has more, which the others do not wait for"
        )

    def _ask(self, own: DistributedStep | None) -> int:
        """Returns the number of examples of all workers; raises ``StopIteration`` if none has."""
        mine = _UNKNOWN if own is None else own.num_examples()
        said = self._workers.exchange(
            "the next batch of a distributed dataset",
            payload=lambda: _PLAN.pack(mine, self._empty is None),
        )
        told = [_PLAN.unpack(one) for one in said]
        if all(count == _UNKNOWN for count, _ in told):
            raise StopIteration
        self._check([is_bare for _, is_bare in told])
        return sum(count for count, _ in told if count != _UNKNOWN)

    def _record(self, step: DistributedStep | None) -> None:
        if step is not None and self._empty is None:
            self._empty = step.empty()

    def _check(self, bare: Sequence[bool]) -> None:
        if any(bare):
            without = ", ".join(str(w) for w, is_bare in enumerate(bare) if is_bare)
            raise BatchError(
                "a worker that has no batches left goes on with empty ones, made like one that "
                f"it has had; worker {without} has had none; give every worker at least one "
                "batch, or all the same dataset, with InputOptions(sharding='data')"
            )


def _shown(batch: Any) -> object:
    """Returns what tells batches apart."""
    return batch.key if isinstance(batch, Fetched) else leaves_of(batch)
