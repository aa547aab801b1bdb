"""DistributedDataset: an iterable of batches, seen as batches distributed over the replicas."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import replace
from time import perf_counter
from typing import Any, cast

import torch

from mirror.base.migration_hints import with_hints
from mirror.base.no_copy import NoCopy
from mirror.base.timeline import CROSS, INPUT, Timeline
from mirror.comm.workers.worker_group import LocalWorkerGroup
from mirror.data.adapters import DatasetAdapter, adapter_of
from mirror.data.distributed_steps import Assembly, Delivery, DistributedStep, DistributedSteps
from mirror.data.input_options import InputOptions, or_default
from mirror.data.load_balance import Balance, balance_of
from mirror.data.prefetch import Closed, OnDemand, Prefetcher
from mirror.data.resume_state import PassPosition, SavedPosition, gather_states, own_state_of
from mirror.data.rng_state import capture_streams, restore_streams, streams_at
from mirror.data.worker_agreement import AgreedBatches, BatchReader, SameBatches, longest
from mirror.data.worker_sharding import sharding_of

Measure = Callable[[], Callable[[], Sequence[float]]]


@with_hints
class DistributedDataset(NoCopy):
    """What ``strategy.distribute_dataset`` returns; iterating gives one distributed batch a step.

    It can be iterated as often as the dataset can: a ``DataLoader`` again and again, also several
    times at once, a generator once. Of an iterator nothing that was read ahead is lost when its
    consumer leaves: the next ``for`` loop goes on there.

    Attributes:
        waited_seconds: how long consumers have waited for batches, in all iterations.
        num_delivered: how many distributed batches they have got.
        before_next: called when a consumer asks for a batch, before anything changes.
    """

    _instead = (
        "take its state_dict(), and load it into strategy.distribute_dataset(loader) of the other "
        "process"
    )

    def __init__(
        self,
        dataset: Iterable[Any],
        devices: Sequence[torch.device],
        options: InputOptions | None = None,
        *,
        joins: bool = False,
        measure: Measure | None = None,
        check_usable: Callable[[], None] = lambda: None,
        timeline: Timeline | None = None,
        workers: LocalWorkerGroup | None = None,
    ) -> None:
        """Distributes the batches of ``dataset`` over ``devices``.

        Args:
            joins: whether each batch is for one replica (``distribute_dataset_from_function``)
                rather than a global one to split.
            measure: begins to measure the replicas for ``weights="auto"``, see ``Balance``.
            check_usable: raises if the strategy is closed.
            timeline: notes how long consumers wait.
            workers: the processes whose replicas train together, see ``sharding_of``.

        Raises:
            TypeError: the dataset is no iterable of batches, or the options are something else.
            ValueError: the weights do not go with the devices, or they, or the sharding, with
                ``joins``.
            BatchError: the dataset cannot be sharded so.
        """
        if isinstance(dataset, DistributedDataset):
            raise TypeError("this dataset is distributed already; iterate over it as it is")
        self.waited_seconds = 0.0
        self.num_delivered = 0
        self.before_next: list[Callable[[], None]] = []
        self._options = or_default(options, InputOptions)
        self._workers = workers = workers or LocalWorkerGroup(len(devices))
        shares = balance_of(self._options, workers, len(devices), joins=joins, measure=measure)
        policy = self._options.policy(joins=joins)
        sharding = sharding_of(dataset, policy, workers, len(devices), shares)
        self._balance = shares if isinstance(shares, Balance) else None
        self._is_own = sharding.is_own
        is_split = workers.is_multi_process and not self._is_own
        self._source = adapter_of(sharding.dataset, sharding.window if is_split else None)
        options = replace(self._options, drop_remainder=False) if self._is_own else self._options
        self._assembly = Assembly(devices, options, sharding.window, joins=joins)
        self._check_usable = check_usable
        self._timeline = timeline
        self._position: PassPosition | None = None  # of the pass that began last, until it is over
        self._saved: SavedPosition | None = None  # a loaded position, where the next pass begins
        self._shared: tuple[BatchReader, PassPosition] | None = (
            None  # the one pass over an iterator
        )
        self._iterators: weakref.WeakSet[DistributedIterator] = weakref.WeakSet()
        if self._is_own:
            self._num_steps = longest(workers, self._own_steps())

    def __iter__(self) -> DistributedIterator:
        """Begins a pass; with ``prefetch`` it is read ahead from the first batch on.

        Raises:
            StrategyError: the strategy is closed.
            ValueError: the dataset has not the batches that a loaded state counts as consumed.
        """
        self._check_usable()
        reader, self._position = self._shared or self._begin()
        if self._source.is_shared:
            self._shared = reader, self._position
        reader.start()
        iterator = DistributedIterator(self, reader, self._position)
        self._iterators.add(iterator)
        return iterator

    def __len__(self) -> int:
        """Returns the number of distributed batches of a pass.

        Raises:
            TypeError: the dataset has no length; with ``drop_remainder`` whether its last batch
                is smaller is not known before it is read, but for a ``DataLoader``. Of workers
                with batches of their own the longest counts.
        """
        if self._is_own and not self._options.drop_remainder and self._num_steps is not None:
            return self._num_steps
        length = len(cast(Sized, self._source.dataset))
        per_step = self._assembly.batches_per_step
        if not (self._options.drop_remainder or self._is_own):
            return -(-length // per_step)
        num_whole = None if self._is_own else self._source.num_whole_batches()
        if num_whole is None:
            raise TypeError(
                "with drop_remainder, or where workers end apart, the number of batches of a "
                f"{type(self._source.dataset).__name__} is not known before they are read"
            )
        return num_whole // per_step or min(length, 1)

    def state_dict(self) -> dict[str, Any]:
        """Returns where the iteration that began last stands, as plain values and tensors.

        What was read ahead and not consumed counts as not read. A ``for`` loop that was left
        stands where it was left, until another one begins. Included are the states of the global
        random streams, of the loader's samplers and generators, and of a dataset that has one of
        its own. Workers with batches of their own all call it: it says where each one stands.
        """
        saved = self._saved
        if saved is None:
            saved = SavedPosition(
                kind=self._source.kind,
                num_batches=self._source.num_batches(),
                has_begun=self._position is not None,
                position=self._position
                or PassPosition(self._source.order(), own_state=self._source.own_state()),
                streams=capture_streams(),
            )
        state = copy.deepcopy(saved.as_state())
        return gather_states(state, self._workers) if self._is_own else state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the next iteration see exactly what was left when the state was taken.

        The order of a map-style ``DataLoader`` is replayed without reading the data; an iterable
        with a ``state_dict`` of its own is given that; of any other what was consumed is read
        again and dropped. The global random streams (torch's on the CPU, Python's, numpy's) are
        set to where they stood, so that what follows draws what the uninterrupted run draws, the
        order of later epochs included. Only what a loader's processes draw begins anew. Ends
        iterations that are going on. The number of replicas may have changed.

        Raises:
            TypeError: the state is not a dict.
            ValueError: it is not one of this class, or of another kind of dataset, or of one with
                another number of batches, of samplers or generators. Nothing is changed then.
        """
        if self._is_own:
            state = own_state_of(state, self._workers)
        saved = SavedPosition.from_state(state, self._source.kind, self._source.num_batches())
        self._source.check_order(saved.position.order)
        self._end_iterations()
        self._source.load_own_state(saved.position.own_state)
        if not saved.has_begun:
            self._source.reorder(saved.position.order)
        restore_streams(saved.streams)
        self._shared = self._position = None
        self._saved = saved if saved.has_begun else None

    def __repr__(self) -> str:
        num_batches = self._source.num_batches()
        of = "" if num_batches is None else f" of {num_batches} batches"
        devices = ", ".join(map(str, self._assembly.devices))
        return f"{type(self).__name__}({type(self._source.dataset).__name__}{of}, [{devices}])"

    @property
    def is_iterated(self) -> bool:
        """Whether somebody holds an iterator of it, as a ``for`` loop does."""
        return bool(self._iterators)

    def close(self) -> None:
        """Ends all iterations and their threads; idempotent."""
        self._end_iterations()

    def _begin(self) -> tuple[BatchReader, PassPosition]:
        sample = None
        if self._saved is None:
            position = PassPosition(self._source.order())
            batches = self._source.begin(0)
            position.own_state = self._source.own_state()
        else:
            position = self._saved.position
            if self._is_own and position.num_consumed:
                found = self._source.sample(position.order)
                sample = None if found is None else DistributedStep([found], None, self._assembly)
            self._source.reorder(position.order)
            with streams_at(position.order["streams"]):
                batches = self._source.begin(position.num_consumed, position.order)
            self._saved = None
        steps = DistributedSteps(
            batches, self._source, self._assembly, first_size=position.first_size
        )
        depth = self._options.prefetch
        reader: BatchReader = Prefetcher(steps, depth) if depth else OnDemand(steps)
        if self._is_own:
            reader = AgreedBatches(
                reader,
                self._workers,
                self._own_steps(position.num_consumed),
                sample=sample,
                reads_ahead=depth > 0,
                drops_remainder=self._options.drop_remainder,
            )
        elif self._workers.is_multi_process:
            reader = SameBatches(reader, self._workers, position.order, self._source.num_batches())
        return reader, position

    def _own_steps(self, num_consumed: int = 0) -> int | None:
        """Returns how many steps this worker's batches still make, ``None`` if not sure."""
        length, per_step = self._source.num_batches(), self._assembly.batches_per_step
        if length is None or not self._source.has_sure_length:
            return None
        return -(-length // per_step) - -(-num_consumed // per_step)

    def _end_iterations(self) -> None:
        for iterator in list(self._iterators):
            iterator.close()  # now: at its end, later, it would rewind what a state has set
        if self._shared is not None:
            self._shared[0].close()

    def _record(self, delivery: Delivery) -> None:
        self._assembly.streams.receive(delivery.events, delivery.tensors())
        self.num_delivered += 1
        if self._balance is not None:
            self._balance.record(delivery.sizes)

    def _note_end(self, position: PassPosition) -> None:
        if position is self._position and not self._source.is_shared:
            self._position = None  # the next pass begins at the start


class DistributedIterator(NoCopy):
    """One iteration over a ``DistributedDataset``; dropping it ends its thread and workers.

    Attributes:
        waited_seconds: how long its consumer has waited for batches.
        num_delivered: how many distributed batches it has got.
    """

    _instead = "take the state_dict() of the distributed dataset"

    def __init__(
        self, dataset: DistributedDataset, reader: BatchReader, position: PassPosition
    ) -> None:
        self.waited_seconds = 0.0
        self.num_delivered = 0
        self._dataset = dataset
        self._reader = reader
        self._position = position
        source = dataset._source
        leave = _leave_shared if source.is_shared else _leave
        self._leave = weakref.finalize(self, leave, reader, source, position)

    def __iter__(self) -> DistributedIterator:
        return self

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.num_delivered} delivered, of {self._dataset!r})"

    def __next__(self) -> Any:
        """Returns the next batch, with ``PerReplica`` leaves on the replicas' devices.

        On GPUs the streams of computation wait for the copies; the host does not.

        Raises:
            BatchError: the leaves of a batch cannot be split together.
            StrategyError: the strategy is closed.
            BaseException: what the dataset raised at this batch.
        """
        dataset, position = self._dataset, self._position
        dataset._check_usable()
        if not self._leave.alive:  # closed; another iteration may go on with its reader
            raise StopIteration
        for asked in tuple(dataset.before_next) if dataset.before_next else ():
            asked()
        timeline, begun = dataset._timeline, perf_counter()
        if timeline is not None:
            timeline.begin(CROSS, INPUT)
        try:
            step = self._take()
            position.num_consumed += step.num_batches
            position.own_state = step.own_state
            position.first_size = self._reader.steps.first_size
            delivery = step.delivery()
        except StopIteration:
            dataset._note_end(position)
            raise
        except Closed:
            dataset._check_usable()
            raise StopIteration from None
        finally:
            if timeline is not None:
                timeline.end(CROSS, INPUT)
            waited = perf_counter() - begun
            self.waited_seconds += waited
            dataset.waited_seconds += waited
        self.num_delivered += 1
        dataset._record(delivery)
        return delivery.batch

    def _take(self) -> DistributedStep:
        try:
            return self._reader.take()
        except (StopIteration, Closed):
            raise
        except Exception:
            self._position.num_consumed += 1  # a loader goes on with the batch after this one
            raise

    def close(self) -> None:
        """Ends the iteration, its thread and the loader's workers; idempotent."""
        self._leave()


def _leave(reader: BatchReader, source: DatasetAdapter, position: PassPosition) -> None:
    """Ends a pass whose iterator is gone."""
    reader.close()
    if reader.was_left:
        source.rewind(position.order, position.num_consumed, position.own_state)


def _leave_shared(reader: BatchReader, source: DatasetAdapter, position: PassPosition) -> None:
    """Ends the thread of an iterator's one pass; another iteration may go on with it."""
    reader.stop()
