"""Sources: a user's dataset as passes over its batches, which can begin in the middle."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from mirror.data.load_balance import FixedBalance
from mirror.data.loader_copy import Indices, copy_of, skip
from mirror.data.rng_state import capture_streams, restore_streams, streams_at
from mirror.data.sampler_state import (
    SHARDED,
    check_order,
    order_of,
    reads_a_shard,
    rewind_generators,
    samplers_of,
    set_order,
)
from mirror.data.worker_sharding import Window
from mirror.errors import BatchError


class DatasetPass:
    """One pass over a dataset's batches.

    Args:
        batches: what gives them.
        end: called once, when nobody reads the pass any more.
    """

    def __init__(self, batches: Iterator[Any], end: Callable[[], None] | None = None) -> None:
        self._batches: Iterator[Any] | None = batches
        self._end = end

    def __next__(self) -> Any:
        if self._batches is None:
            raise StopIteration
        return next(self._batches)

    def end(self) -> None:
        """Lets go of the batches, and so of a loader's worker processes; idempotent."""
        self._batches = None
        end, self._end = self._end, None
        if end is not None:
            end()


class DatasetAdapter:
    """Any iterable of batches; a pass begins in the middle by reading what was consumed.

    Attributes:
        kind: names the way to resume in a saved state.
        is_shared: whether all passes are one, as those of an iterator, which cannot begin again.
    """

    kind = "iterable"

    def __init__(self, dataset: Iterable[Any]) -> None:
        self.dataset = dataset
        self.is_shared = isinstance(dataset, Iterator)

    def begin(self, num_consumed: int, order: Mapping[str, Any] | None = None) -> DatasetPass:
        """Begins a pass after its first ``num_consumed`` batches.

        Args:
            order: of the pass to be replayed, to which the source and the global streams have
                been set; ``None`` for a new pass.

        Raises:
            ValueError: there are not as many.
        """
        batches = iter(self.dataset)
        skip(batches, num_consumed)
        return DatasetPass(batches)

    def order(self) -> dict[str, Any]:
        """Returns what decides the order of a pass that would begin now."""
        return {"streams": capture_streams()}

    def check_order(self, order: Mapping[str, Any]) -> None:
        """Raises ``ValueError`` if the order is not one of this dataset's."""

    def reorder(self, order: Mapping[str, Any]) -> None:
        """Makes the next pass have this order; the global streams are the caller's business."""

    def num_whole_batches(self) -> int | None:
        """Returns how many batches are as large as the first one, ``None`` if unknown."""
        return None

    def num_batches(self) -> int | None:
        """Returns what ``len(dataset)`` tells, ``None`` if nothing."""
        try:
            return len(self.dataset)  # type: ignore[arg-type]
        except (TypeError, NotImplementedError):
            return None

    @property
    def has_sure_length(self) -> bool:
        """Whether a pass has as many batches as ``len(dataset)`` tells."""
        return type(self.dataset) in (list, tuple)

    def sample(self, order: Mapping[str, Any]) -> Any:
        """Returns a batch of a pass, read apart from any; ``None`` where that is impossible."""
        if self.is_shared:
            return None
        self.reorder(order)
        with streams_at(order["streams"]):
            batches = self.begin(0, order)
            try:
                return next(batches)
            except StopIteration:
                return None
            finally:
                batches.end()

    def own_state(self) -> Any:
        """Returns the dataset's own state, ``None`` where it has none."""
        return None

    def load_own_state(self, state: Any) -> None:
        """Gives a state to the dataset, whose next pass begins there."""

    def rewind(self, order: Mapping[str, Any], num_consumed: int, own_state: Any) -> None:
        """Puts a dataset that was read ahead back to where its consumer left.

        Args:
            order: of the pass that was left.
            num_consumed: how many of its batches the consumer took.
            own_state: the dataset's own state after these.
        """


class StatefulAdapter(DatasetAdapter):
    """An iterable that knows its position: torchdata's ``StatefulDataLoader``, or a stream."""

    kind = "stateful"

    def begin(self, num_consumed: int, order: Mapping[str, Any] | None = None) -> DatasetPass:
        """Begins where the dataset's own state says."""
        try:
            return DatasetPass(iter(self.dataset))
        except Exception as error:
            if order is None:
                raise
            raise self._refused(error) from error

    def sample(self, order: Mapping[str, Any]) -> Any:
        return None

    def own_state(self) -> Any:
        return copy.deepcopy(self.dataset.state_dict())  # type: ignore[attr-defined]

    def load_own_state(self, state: Any) -> None:
        dataset: Any = self.dataset
        # A loader looks at its state when it begins; to ask for it may start its workers.
        before = None if isinstance(dataset, DataLoader) else self.own_state()
        try:
            dataset.load_state_dict(state)
        except Exception as error:
            if before is not None:
                dataset.load_state_dict(before)
            raise self._refused(error) from error

    def _refused(self, error: Exception) -> ValueError:
        return ValueError(
            f"a {type(self.dataset).__name__} refuses the state that was saved of it, "
            f"{type(error).__name__}: {error}; it is damaged, or of another dataset"
        )

    def rewind(self, order: Mapping[str, Any], num_consumed: int, own_state: Any) -> None:
        # A loader's next pass is a new epoch, wherever the last one was left.
        if not isinstance(self.dataset, DataLoader):
            self.load_own_state(own_state)


class LoaderAdapter(DatasetAdapter):
    """A ``DataLoader``; of a map-style one only the indices of what was consumed are read.

    Each pass has a copy of the loader, so that passes do not disturb each other: a loader with
    persistent workers has one set of them, which serves one pass at a time. The copies with
    persistent workers belong to the loader: a dataset distributed again in every epoch goes on
    with the workers of the epoch before, and draws no seed for new ones, as a plain loop does.

    Args:
        window: fetches the examples of this window alone, where it can: [Note: Windows].
    """

    kind = "loader"

    def __init__(self, dataset: DataLoader[Any], window: Window | None) -> None:
        super().__init__(dataset)
        self._loader = dataset
        self._window = window
        self._idle = _idle_copies(dataset, window)

    def begin(self, num_consumed: int, order: Mapping[str, Any] | None = None) -> DatasetPass:
        loader = self._idle.pop() if self._idle else copy_of(self._loader, self._window)
        end = (lambda: self._idle.append(loader)) if _persists(loader) else None
        indices = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        if not isinstance(indices, Indices):
            batches: Iterator[Any] = iter(loader)
            skip(batches, num_consumed)
            return DatasetPass(batches, end)
        indices.num_skipped = num_consumed
        if order is not None and order.get("reuses_workers") and loader._iterator is None:
            indices.before_first = lambda: self._replay(order)
        # In the caller's thread: it draws the seeds from the global generator, and starts workers.
        batches = iter(loader)
        if loader.num_workers == 0:
            indices.prime()
        return DatasetPass(batches, end)

    def _replay(self, order: Mapping[str, Any]) -> None:
        """Forgets the seed of new workers, where the pass to be replayed had drawn none."""
        restore_streams(order["streams"])
        self.reorder(order)

    def order(self) -> dict[str, Any]:
        return {
            **super().order(),
            **order_of(self._loader),
            "reuses_workers": bool(self._idle),
        }

    def rewind(self, order: Mapping[str, Any], num_consumed: int, own_state: Any) -> None:
        if not isinstance(self._loader.dataset, IterableDataset):
            rewind_generators(self._loader, order, num_consumed)

    def check_order(self, order: Mapping[str, Any]) -> None:
        if not isinstance(order.get("reuses_workers", False), bool):
            raise ValueError("a state tells by a bool whether workers went on; this one does not")
        check_order(self._loader, order)

    def reorder(self, order: Mapping[str, Any]) -> None:
        set_order(self._loader, order)

    @property
    def has_sure_length(self) -> bool:
        return not isinstance(self._loader.dataset, IterableDataset)

    def num_whole_batches(self) -> int | None:
        known: int | None = getattr(self._loader.sampler, "num_whole_batches", None)
        size = self._loader.batch_size
        if size is not None and isinstance(self._loader.sampler, Sized):
            return len(self._loader.sampler) // size
        return known


# The copies of each loader whose persistent workers wait for their next pass.
_idle: weakref.WeakKeyDictionary[
    DataLoader[Any], list[tuple[Window | None, list[DataLoader[Any]]]]
] = weakref.WeakKeyDictionary()


def _idle_copies(loader: DataLoader[Any], window: Window | None) -> list[DataLoader[Any]]:
    """Returns the list of a loader's idle copies that fetch this window."""
    if window is not None and not isinstance(window.balance, FixedBalance):
        return []  # its shares change: no other dataset has the same windows
    by_window = _idle.setdefault(loader, [])
    for known, copies in by_window:
        if known == window:
            return copies
    by_window.append((window, []))
    return by_window[-1][1]


class TensorFlowAdapter(DatasetAdapter):
    """A ``tf.data.Dataset``, whose batches come as numpy arrays."""

    def begin(self, num_consumed: int, order: Mapping[str, Any] | None = None) -> DatasetPass:
        batches: Iterator[Any] = self.dataset.as_numpy_iterator()  # type: ignore[attr-defined]
        skip(batches, num_consumed)
        return DatasetPass(batches)


def adapter_of(dataset: Iterable[Any], window: Window | None = None) -> DatasetAdapter:
    """Returns the source for a dataset.

    Args:
        window: of each batch, if others than this one are for other workers.

    Raises:
        TypeError: it cannot be iterated, or gives keys, characters or single examples.
        BatchError: its loader's sampler leaves out what other processes would read.
    """
    if isinstance(dataset, (Mapping, str, bytes)):
        raise TypeError(
            "a dataset must be an iterable of batches; got a "
            f"{type(dataset).__name__}, which gives its keys or characters; batches of arrays in "
            "memory, a dict of them too, are made by mirror.data.from_arrays(arrays, batch_size)"
        )
    if _is_one_batch(dataset):
        raise TypeError(
            f"a dataset must be an iterable of batches; got a {type(dataset).__name__} of tensors "
            "or numbers, one batch or all examples; one batch is [batch], and batches of arrays "
            "in memory are made by mirror.data.from_arrays(arrays, batch_size)"
        )
    if callable(dataset) and not isinstance(dataset, Iterable):
        raise TypeError(
            "a dataset must be an iterable of batches; got something to call; call it, or pass "
            "it to strategy.distribute_dataset_from_function(fn)"
        )
    if not isinstance(dataset, Iterable):
        raise TypeError(
            "a dataset must be an iterable of batches, a DataLoader for instance; got "
            f"a {type(dataset).__name__}; wrap a map-style dataset in "
            "torch.utils.data.DataLoader(dataset, batch_size=...)"
        )
    if isinstance(dataset, DataLoader):
        for sampler in samplers_of(dataset)[0]:
            if reads_a_shard(sampler):
                raise BatchError(SHARDED.format(sampler.num_replicas))
    if hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict"):
        return StatefulAdapter(dataset)
    if isinstance(dataset, DataLoader) and type(dataset).__iter__ is DataLoader.__iter__:
        return LoaderAdapter(dataset, window)
    is_of_tensorflow = callable(getattr(dataset, "as_numpy_iterator", None))
    return TensorFlowAdapter(dataset) if is_of_tensorflow else DatasetAdapter(dataset)


def _is_one_batch(dataset: object) -> bool:
    """Whether iterating would give the rows of an array, or the columns of a batch."""
    arrays = (torch.Tensor, np.ndarray)
    if type(dataset) is tuple:
        return len(dataset) > 1 and all(isinstance(item, arrays) for item in dataset)
    return isinstance(dataset, arrays)


def _persists(loader: DataLoader[Any]) -> bool:
    return loader.persistent_workers and loader.num_workers > 0
