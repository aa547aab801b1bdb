"""Adapters of datasets: each begins passes over a dataset's batches, also in the middle."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from mirror.data.loader_copy import Indices, copy_loader, skip
from mirror.data.loader_order import (
    SHARDED,
    capture_order,
    check_order,
    count_cut,
    reads_a_shard,
    rebatch_state,
    rewind_generators,
    samplers_of,
    set_order,
)
from mirror.data.rng_state import capture_rng, replaying_rng, restore_rng
from mirror.data.split_batch import FixedBalance
from mirror.data.worker_sharding import Window
from mirror.errors import BatchError


def make_adapter(dataset: Iterable[Any], window: Window | None = None) -> DatasetAdapter:
    """Returns the adapter for a dataset.

    Args:
        window: this worker's window of each batch; ``None`` for whole batches.

    Raises:
        TypeError: the dataset is not iterable, or yields keys, characters or single examples.
        BatchError: the loader's sampler skips examples that no other process reads.
    """
    if isinstance(dataset, (Mapping, str, bytes)):
        raise TypeError(
            "a dataset must be an iterable of batches; got a "
            f"{type(dataset).__name__}, which yields its keys or characters; for arrays in "
            "memory, also in a dict, use mirror.data.from_arrays(arrays, batch_size)"
        )
    if _is_single_batch(dataset):
        raise TypeError(
            f"a dataset must be an iterable of batches; got a {type(dataset).__name__} of tensors "
            "or numbers, one batch or all examples; pass one batch as [batch], and for arrays in "
            "memory use mirror.data.from_arrays(arrays, batch_size)"
        )
    if callable(dataset) and not isinstance(dataset, Iterable):
        raise TypeError(
            "a dataset must be an iterable of batches; got a function; call it, or pass it to "
            "strategy.distribute_dataset_from_function(fn)"
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


def _is_single_batch(dataset: object) -> bool:
    """Returns whether iteration would yield the rows of an array, or the columns of a batch."""
    arrays = (torch.Tensor, np.ndarray)
    if type(dataset) is tuple:
        return len(dataset) > 1 and all(isinstance(item, arrays) for item in dataset)
    return isinstance(dataset, arrays)


class DatasetPass:
    """One pass over a dataset's batches.

    Args:
        batches: the iterator over them.
        end: called once, when the pass ends.
    """

    def __init__(self, batches: Iterator[Any], end: Callable[[], None] | None = None) -> None:
        self._batches: Iterator[Any] | None = batches
        self._end = end

    def __next__(self) -> Any:
        if self._batches is None:
            raise StopIteration
        return next(self._batches)

    def end(self) -> None:
        """Frees the iterator, and with it a loader's worker processes. Idempotent."""
        self._batches = None
        end, self._end = self._end, None
        if end is not None:
            end()


class DatasetAdapter:
    """Any iterable of batches; to begin in the middle, a pass reads the consumed batches again.

    Attributes:
        kind: the name of the way to resume, in a saved state.
        is_shared: whether all iterations share one pass, as those over an iterator do.
    """

    kind = "iterable"

    def __init__(self, dataset: Iterable[Any]) -> None:
        self.dataset = dataset
        self.is_shared = isinstance(dataset, Iterator)

    def begin(self, num_consumed: int, order: Mapping[str, Any] | None = None) -> DatasetPass:
        """Begins a pass after its first ``num_consumed`` batches.

        Args:
            order: the order of a replayed pass, to which the dataset and the global generators
                have been set; ``None`` for a new pass.

        Raises:
            ValueError: there are fewer batches.
        """
        batches = iter(self.dataset)
        skip(batches, num_consumed)
        return DatasetPass(batches)

    def order(self) -> dict[str, Any]:
        """Returns the state that decides the order of a pass that begins now."""
        return {"streams": capture_rng()}

    def rebatch_state(self, state: Any) -> Any:
        """Returns a state that another batch size may have saved, for that of this dataset."""
        return state

    def check_order(self, order: Mapping[str, Any]) -> None:
        """Raises ``ValueError`` if the order is not one of this dataset."""

    def reorder(self, order: Mapping[str, Any]) -> None:
        """Sets the order of the next pass; the caller restores the global generators."""

    def num_whole_batches(self) -> int | None:
        """Returns the number of batches as large as the first one; ``None`` if unknown."""
        return None

    def num_batches(self) -> int | None:
        """Returns ``len(dataset)``; ``None`` if it has none."""
        try:
            return len(self.dataset)  # type: ignore[arg-type]
        except (TypeError, NotImplementedError):
            return None

    @property
    def has_sure_length(self) -> bool:
        """Whether a pass certainly has ``len(dataset)`` batches."""
        return type(self.dataset) in (list, tuple)

    def sample(self, order: Mapping[str, Any]) -> Any:
        """Returns the first batch of a separate pass; ``None`` if that is impossible."""
        if self.is_shared:
            return None
        self.reorder(order)
        with replaying_rng(order["streams"]):
            batches = self.begin(0, order)
            try:
                return next(batches)
            except StopIteration:
                return None
            finally:
                batches.end()

    def own_state(self) -> Any:
        """Returns the dataset's own state; ``None`` if it has none."""
        return None

    def load_own_state(self, state: Any) -> None:
        """Loads the dataset's own state: its next pass begins there."""

    def rewind(self, order: Mapping[str, Any], num_consumed: int, own_state: Any) -> None:
        """Rewinds a dataset that was read ahead to the position of its consumer.

        Args:
            order: the order of the pass that ended early.
            num_consumed: the number of its batches that the consumer took.
            own_state: the dataset's own state after these batches.
        """


class StatefulAdapter(DatasetAdapter):
    """An iterable with a ``state_dict``: torchdata's ``StatefulDataLoader``, or a stream."""

    kind = "stateful"

    def begin(self, num_consumed: int, order: Mapping[str, Any] | None = None) -> DatasetPass:
        """Begins a pass at the position of the dataset's own state."""
        try:
            return DatasetPass(iter(self.dataset))
        except Exception as error:
            if order is None:
                raise
            raise self._state_error(error) from error

    def sample(self, order: Mapping[str, Any]) -> Any:
        return None

    def own_state(self) -> Any:
        return copy.deepcopy(self.dataset.state_dict())  # type: ignore[attr-defined]

    def load_own_state(self, state: Any) -> None:
        dataset: Any = self.dataset
        # A loader checks its state when it begins, and asking for a state may start its workers.
        before = None if isinstance(dataset, DataLoader) else self.own_state()
        try:
            dataset.load_state_dict(state)
        except Exception as error:
            if before is not None:
                dataset.load_state_dict(before)
            raise self._state_error(error) from error

    def _state_error(self, error: Exception) -> ValueError:
        return ValueError(
            f"a {type(self.dataset).__name__} rejects its saved state, "
            f"{type(error).__name__}: {error}; the state is damaged, or of another dataset"
        )

    def rewind(self, order: Mapping[str, Any], num_consumed: int, own_state: Any) -> None:
        # A loader's next pass is a new epoch, wherever the last one ended.
        if not isinstance(self.dataset, DataLoader):
            self.load_own_state(own_state)


class LoaderAdapter(DatasetAdapter):
    """A ``DataLoader``; a map-style one skips consumed batches without reading their data.

    Each pass has its own copy of the loader, since a loader's persistent workers serve one pass
    at a time. Copies with persistent workers are kept per loader. A program that distributes a
    loader again in every epoch therefore reuses the workers, and draws no seed for new ones, as a
    plain loop does.

    Args:
        window: the examples to fetch of each batch, if the loader allows it.
    """

    kind = "loader"

    def __init__(self, dataset: DataLoader[Any], window: Window | None) -> None:
        super().__init__(dataset)
        self._loader = dataset
        self._window = window
        self._idle = _idle_copies(dataset, window)

    def begin(self, num_consumed: int, order: Mapping[str, Any] | None = None) -> DatasetPass:
        loader = self._idle.pop() if self._idle else copy_loader(self._loader, self._window)
        persists = loader.persistent_workers and loader.num_workers > 0
        end = (lambda: self._idle.append(loader)) if persists else None
        indices = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        if not isinstance(indices, Indices):
            batches: Iterator[Any] = iter(loader)
            skip(batches, num_consumed)
            return DatasetPass(batches, end)
        indices.num_skipped, indices.num_cut = num_consumed, count_cut(order or {}, num_consumed)
        if order is not None and order.get("reuses_workers") and loader._iterator is None:
            indices.before_first = lambda: self._replay(order)
        # In this thread: the iterator draws seeds from the global generator and starts workers.
        batches = iter(loader)
        if loader.num_workers == 0:
            indices.prime()
        return DatasetPass(batches, end)

    def _replay(self, order: Mapping[str, Any]) -> None:
        """Undoes the draw of new workers' seed, since the replayed pass had drawn none."""
        restore_rng(order["streams"])
        self.reorder(order)

    def order(self) -> dict[str, Any]:
        return {
            **super().order(),
            **capture_order(self._loader),
            "reuses_workers": bool(self._idle),
        }

    def rewind(self, order: Mapping[str, Any], num_consumed: int, own_state: Any) -> None:
        if not isinstance(self._loader.dataset, IterableDataset):
            rewind_generators(self._loader, order, num_consumed)

    def rebatch_state(self, state: Any) -> Any:
        return rebatch_state(self._loader, state)

    def check_order(self, order: Mapping[str, Any]) -> None:
        if not isinstance(order.get("reuses_workers", False), bool):
            raise ValueError("the entry 'reuses_workers' of a state must be a bool")
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


class TensorFlowAdapter(DatasetAdapter):
    """A ``tf.data.Dataset``; its batches are NumPy arrays."""

    def begin(self, num_consumed: int, order: Mapping[str, Any] | None = None) -> DatasetPass:
        batches: Iterator[Any] = self.dataset.as_numpy_iterator()  # type: ignore[attr-defined]
        skip(batches, num_consumed)
        return DatasetPass(batches)


# Each loader's copies with persistent workers, between passes.
_idle: weakref.WeakKeyDictionary[
    DataLoader[Any], list[tuple[Window | None, list[DataLoader[Any]]]]
] = weakref.WeakKeyDictionary()


def _idle_copies(loader: DataLoader[Any], window: Window | None) -> list[DataLoader[Any]]:
    """Returns the list of a loader's idle copies that fetch this window."""
    if window is not None and not isinstance(window.balance, FixedBalance):
        return []  # the shares change: no other dataset has the same windows
    by_window = _idle.setdefault(loader, [])
    for other, copies in by_window:
        if other == window:
            return copies
    by_window.append((window, []))
    return by_window[-1][1]
