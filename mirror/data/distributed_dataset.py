"""DistributedDataset: yields the batches of a dataset, distributed over the replicas."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import replace
from time import perf_counter
from typing import Any, NoReturn, cast

import torch

from mirror.base.migration_hints import add_hints
from mirror.base.process_bound import NoCopy
from mirror.base.timeline import CROSS, INPUT, Timeline
from mirror.comm.workers.worker_group import LocalWorkerGroup
from mirror.data.adapters import DatasetAdapter, make_adapter
from mirror.data.distributed_steps import Assembly, Delivery, DistributedStep, DistributedSteps
from mirror.data.input_options import InputOptions, resolve_options
from mirror.data.resume_state import PassPosition, SavedPosition, gather_states, select_own_state
from mirror.data.rng_state import capture_rng, replaying_rng, restore_rng
from mirror.data.split_batch import Balance, make_balance
from mirror.data.step_readers import (
    AgreedBatches,
    BatchReader,
    Closed,
    OnDemand,
    Prefetcher,
    SameBatches,
    max_num_steps,
)
from mirror.data.worker_sharding import choose_sharding

Measure = Callable[[], Callable[[], Sequence[float]]]


@add_hints
class DistributedDataset(NoCopy):
    """The result of ``strategy.distribute_dataset``; iterating yields one batch per step.

    It can be iterated as often as the dataset: a ``DataLoader`` repeatedly, also several times at
    once, a generator once. If a loop over an iterator ends early, the batches that were read
    ahead are kept, and the next ``for`` loop continues with them.

    Attributes:
        waited_seconds: the time that consumers have waited for batches, in all iterations.
        num_delivered: the number of batches that consumers have received.
        before_next: functions that are called when a consumer asks for a batch, before any change.
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
            joins: whether each batch is for one replica (``distribute_dataset_from_function``),
                instead of a global batch to split.
            measure: starts measuring the replicas for ``weights="auto"``, see ``Balance``.
            check_usable: raises if the strategy is closed.
            timeline: records the time that consumers wait.
            workers: the processes that train together, see ``choose_sharding``.

        Raises:
            TypeError: the dataset is no iterable of batches, or the options have another type.
            ValueError: the weights do not fit the devices, or the weights or the sharding do not
                fit ``joins``.
            BatchError: the dataset cannot be sharded by this policy.
        """
        if isinstance(dataset, DistributedDataset):
            raise TypeError("this dataset is distributed already; iterate over it as it is")
        self.waited_seconds = 0.0
        self.num_delivered = 0
        self.before_next: list[Callable[[], None]] = []
        self._options = resolve_options(options, InputOptions)
        self._workers = workers = workers or LocalWorkerGroup(len(devices))
        shares = make_balance(self._options, workers, len(devices), joins=joins, measure=measure)
        policy = self._options.policy(joins=joins)
        sharding = choose_sharding(dataset, policy, workers, len(devices), shares)
        self._balance = shares if isinstance(shares, Balance) else None
        self._is_own = sharding.is_own
        is_split = workers.is_multi_process and not self._is_own
        self._source = make_adapter(sharding.dataset, sharding.window if is_split else None)
        options = replace(self._options, drop_remainder=False) if self._is_own else self._options
        self._assembly = Assembly(devices, options, sharding.window, joins=joins)
        self._check_usable = check_usable
        self._timeline = timeline
        self._position: PassPosition | None = None  # of the latest pass, until it ends
        self._saved: SavedPosition | None = None  # a loaded position: the next pass begins there
        self._shared: tuple[BatchReader, PassPosition] | None = (
            None  # the one pass over an iterator
        )
        self._iterators: weakref.WeakSet[DistributedIterator] = weakref.WeakSet()
        if self._is_own:
            self._num_steps = max_num_steps(workers, self._own_steps())

    def __getitem__(self, index: object) -> NoReturn:
        """Raises TypeError: batches are distributed as a loop asks for them."""
        raise TypeError(
            "a distributed dataset is not subscriptable; its first batch is next(iter(batches)), "
            "and the first n are list(itertools.islice(batches, n))"
        )

    def __iter__(self) -> DistributedIterator:
        """Begins a pass; with ``prefetch`` a thread reads ahead from the first batch on.

        Raises:
            StrategyError: the strategy is closed.
            ValueError: the dataset has fewer batches than a loaded state counts as consumed.
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
            TypeError: the dataset has no length. With ``drop_remainder`` only a ``DataLoader``
                has one, since the size of the last batch must be known. If workers have their own
                batches, the longest dataset counts.
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
        """Returns the position of the latest iteration, as plain values and tensors.

        Batches that were read ahead and not consumed count as not read. A ``for`` loop that ended
        early keeps its position until the next one begins. The state includes the global random
        generators, the loader's samplers and generators, and the dataset's own state if it has
        one. If workers have their own batches, all of them call it, and the state has the
        position of each.
        """
        saved = self._saved
        if saved is None:
            saved = SavedPosition(
                kind=self._source.kind,
                num_batches=self._source.num_batches(),
                has_begun=self._position is not None,
                position=self._position
                or PassPosition(self._source.order(), own_state=self._source.own_state()),
                streams=capture_rng(),
            )
        state = copy.deepcopy(saved.as_state())
        return gather_states(state, self._workers) if self._is_own else state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the next iteration yield exactly the batches that remained when it was saved.

        The order of a map-style ``DataLoader`` is replayed without reading its data. An iterable
        with its own ``state_dict`` loads its state. Any other dataset reads the consumed batches
        again and drops them. The global random generators (torch's on the CPU, Python's, NumPy's)
        are restored, so that the program draws the numbers of an uninterrupted run, also for the
        order of later epochs; only a loader's worker processes start new sequences. Active
        iterations end. The number of replicas may differ. So may the batch size of a map-style
        ``DataLoader``: each example of the pass is read once, and the next batch may be smaller.

        Raises:
            TypeError: the state is not a dict.
            ValueError: the state is not of this class, or is of a dataset of another kind or with
                another number of batches, samplers or generators. Nothing is changed.
        """
        if self._is_own:
            state = select_own_state(state, self._workers)
        state = self._source.rebatch_state(state)
        saved = SavedPosition.from_state(state, self._source.kind, self._source.num_batches())
        self._source.check_order(saved.position.order)
        self._end_iterations()
        self._source.load_own_state(saved.position.own_state)
        if not saved.has_begun:
            self._source.reorder(saved.position.order)
        restore_rng(saved.streams)
        self._shared = self._position = None
        self._saved = saved if saved.has_begun else None

    def __repr__(self) -> str:
        num_batches = self._source.num_batches()
        size = "" if num_batches is None else f" of {num_batches} batches"
        devices = ", ".join(map(str, self._assembly.devices))
        return f"{type(self).__name__}({type(self._source.dataset).__name__}{size}, [{devices}])"

    @property
    def is_iterated(self) -> bool:
        """Whether an iterator of it is alive, as in a ``for`` loop."""
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
            with replaying_rng(position.order["streams"]):
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
        """Returns the number of this worker's remaining steps; ``None`` if it is not certain."""
        length, per_step = self._source.num_batches(), self._assembly.batches_per_step
        if length is None or not self._source.has_sure_length:
            return None
        return -(-length // per_step) - -(-num_consumed // per_step)

    def _end_iterations(self) -> None:
        for iterator in list(self._iterators):
            iterator.close()  # a later finalizer would rewind what a loaded state has set
        if self._shared is not None:
            self._shared[0].close()

    def _record(self, delivery: Delivery) -> None:
        self._assembly.streams.receive(delivery.events, delivery.tensors())
        self.num_delivered += 1
        if self._balance is not None:
            self._balance.record(delivery.sizes)

    def _on_pass_end(self, position: PassPosition) -> None:
        if position is self._position and not self._source.is_shared:
            self._position = None  # the next pass begins at the start


class DistributedIterator(NoCopy):
    """One iteration over a ``DistributedDataset``; dropping it ends its thread and workers.

    Attributes:
        waited_seconds: the time that its consumer has waited for batches.
        num_delivered: the number of batches that its consumer has received.
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

        On GPUs the compute streams wait for the copies; the host does not.

        Raises:
            BatchError: the leaves of a batch cannot be split together.
            StrategyError: the strategy is closed.
            BaseException: the error that the dataset raised at this batch.
        """
        dataset, position = self._dataset, self._position
        dataset._check_usable()
        if not self._leave.alive:  # closed; another iteration may use its reader
            raise StopIteration
        for listener in tuple(dataset.before_next) if dataset.before_next else ():
            listener()
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
            dataset._on_pass_end(position)
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
            self._position.num_consumed += 1  # a loader continues with the next batch
            raise

    def close(self) -> None:
        """Ends the iteration, its thread and the loader's workers; idempotent."""
        self._leave()


def _leave(reader: BatchReader, source: DatasetAdapter, position: PassPosition) -> None:
    """Ends a pass when its iterator is closed or freed."""
    reader.close()
    if reader.was_left:
        source.rewind(position.order, position.num_consumed, position.own_state)


def _leave_shared(reader: BatchReader, source: DatasetAdapter, position: PassPosition) -> None:
    """Ends the thread of a shared pass; another iteration may continue the pass."""
    reader.stop()
