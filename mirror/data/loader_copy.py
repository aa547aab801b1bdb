"""Copies of a ``DataLoader``: they skip batches, and fetch only this worker's examples.

Each pass over a distributed loader uses a copy, so that the user's loader stays as it is. The
copy's sampler is wrapped by ``Indices``, which skips consumed batches without reading their data.
With several workers its dataset is wrapped by ``WindowDataset``.

All workers iterate the same global batches, and each needs a window of every batch. If a loader
fetches single examples and stacks them, a part of the batch can be made from its examples alone.
So the samplers run unchanged, and the dataset is asked for the window's examples only.

A dataset that draws random numbers per example (a random crop) would draw other numbers if it
fetched fewer. So generators are compared before and after: once they have moved, they are restored
and all examples are fetched from then on. A dataset that holds generators always fetches all. In
the training process only the first batch is compared, since nothing else draws meanwhile.

Other loaders read whole batches, and each worker takes its window: datasets that fetch batches
(``__getitems__``, ``batch_size=None``), the user's ``collate_fn`` (which may pad to the longest
example), iterable datasets, loader classes other than torch's.
"""

from __future__ import annotations

import copy
import gc
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    default_collate,
    get_worker_info,
)

from mirror.base.bitwise import same_values
from mirror.data.from_arrays import Arrays
from mirror.data.rng_state import capture_rng, restore_rng
from mirror.data.worker_sharding import Window, batch_hash
from mirror.values import leaves_of

_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_MAX_SEEN = 10_000  # the most objects of a dataset that a search visits
_MAX_ENTRIES = 50  # the most entries of a container that a search visits


def copy_loader(loader: DataLoader[Any], window: Window | None) -> DataLoader[Any]:
    """Returns a copy of a loader with a sampler that can skip.

    Args:
        window: the part of each batch that the copy fetches; ``None`` for whole batches.
    """
    clone = copy.copy(loader)
    clone._iterator = None  # the persistent workers belong to the user's loader
    if not isinstance(loader.dataset, IterableDataset):
        # The setter forbids the change; it is safe, as only the copy's iterator reads indices.
        name = "sampler" if loader.batch_sampler is None else "batch_sampler"
        clone.__dict__[name] = Indices(getattr(loader, name))
    if window is not None:
        fetch_windows(clone, window)
    return clone


class Indices:
    """Wraps a loader's sampler or batch sampler, to skip indices and to read the first one early.

    Attributes:
        num_skipped: the number of indices that the next read skips first.
        num_cut: the number of examples that the next batch lacks.
        before_first: called before the first index is read.
    """

    def __init__(self, sampler: Iterable[Any]) -> None:
        self._sampler = sampler
        self._iterator: Iterator[Any] = iter(())
        self._primed: list[Any] = []
        self.num_skipped = self.num_cut = 0
        self.before_first: Callable[[], None] | None = None

    def __len__(self) -> int:
        return len(self._sampler)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        self._iterator, self._primed = iter(self._sampler), []
        return self

    def __next__(self) -> Any:
        if self._primed:
            return self._primed.pop()
        before_first, self.before_first = self.before_first, None
        if before_first is not None:
            before_first()
        num_skipped, self.num_skipped = self.num_skipped, 0
        skip(self._iterator, num_skipped)
        num_cut, self.num_cut = self.num_cut, 0
        index = next(self._iterator)
        return _drop_first(index, num_cut) if num_cut else index

    def prime(self) -> None:
        """Reads the first index now, since samplers draw their seed when they begin."""
        try:
            self._primed = [next(self)]
        except StopIteration:
            self._iterator = iter(())


def _drop_first(index: Any, count: int) -> Any:
    """Returns the index of a batch, a slice or a sequence, without its first examples."""
    return slice(index.start + count, index.stop) if isinstance(index, slice) else index[count:]


def skip(batches: Iterator[Any], count: int) -> None:
    """Reads ``count`` batches; raises ``ValueError`` if there are fewer."""
    ended = object()
    for k in range(count):
        if next(batches, ended) is ended:
            raise ValueError(
                f"a dataset must have the batches that the loaded state counts as consumed, "
                f"{count}; this one ended after {k}; resume with the dataset that was saved"
            )


class WindowBatch(NamedTuple):
    """One batch, of which only the window's examples were fetched.

    Attributes:
        part: the window's examples, collated; for an empty window one example of another window.
        num_examples: the number of examples in the whole batch.
        key: a hash that identifies the batch on all workers.
    """

    part: Any
    num_examples: int
    key: int


def fetch_windows(loader: DataLoader[Any], window: Window) -> None:
    """Makes a copied loader yield ``WindowBatch`` where it equals a part of the whole batch."""
    dataset: Any = loader.dataset
    changed: dict[str, Any] = {}
    if isinstance(dataset, Arrays) and loader.batch_size is None:
        changed["dataset"] = _ArraysWindow(dataset, window)
    elif _fetches_examples(loader):
        changed["dataset"] = WindowDataset(dataset, window, reads_all=_has_generators(dataset))
        changed["collate_fn"] = _Collate(loader.collate_fn)
    if changed and loader.num_workers:
        changed["worker_init_fn"] = _WorkerInit(dataset, loader.worker_init_fn)
    # The setter forbids changes; they are safe before the loader's first iteration.
    loader.__dict__.update(changed)


def _fetches_examples(loader: DataLoader[Any]) -> bool:
    dataset: Any = loader.dataset
    if isinstance(dataset, IterableDataset) or loader.batch_sampler is None:
        return False
    while type(dataset) is Subset:
        dataset = dataset.dataset
    at_once = getattr(dataset, "__getitems__", None)
    return at_once is None and loader.collate_fn is default_collate


class _WindowExamples(NamedTuple):
    """The examples of a window before ``collate_fn``."""

    examples: list[Any]
    num_examples: int
    key: int


class WindowDataset(Dataset[Any]):
    """A map-style dataset that is asked for whole batches, and fetches the window's examples.

    Args:
        reads_all: whether to fetch all examples, instead of a window.
    """

    def __init__(self, dataset: Any, window: Window, *, reads_all: bool) -> None:
        self._dataset = dataset
        self._window = window
        self._reads_all = reads_all
        self._is_first = True  # no batch was read in this process yet

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: Any) -> Any:
        return self._dataset[index]

    def __getitems__(self, indices: Sequence[Any]) -> _WindowExamples:
        indices = list(indices)
        begin, end = self._window.bounds(len(indices))
        if begin == end:  # an empty window: one example shows the structure, and is cut off later
            begin, end = 0, min(1, len(indices))
        key = self._key(indices)
        compares = self._is_first or get_worker_info() is not None
        self._is_first = False
        if not self._reads_all:
            before = capture_rng() if compares else None
            own = [self._dataset[index] for index in indices[begin:end]]
            if before is None or same_values(before, capture_rng()):
                return _WindowExamples(own, len(indices), key)
            restore_rng(before)
            self._reads_all = True
        return _WindowExamples([self._dataset[i] for i in indices][begin:end], len(indices), key)

    def _key(self, indices: list[Any]) -> int:
        """Returns a hash of the indices and, for the first batch, of its first example."""
        if not self._is_first or self._reads_all or not indices:
            return _key_of(indices)
        before = capture_rng()
        example: Any = self._dataset[indices[0]]
        if same_values(before, capture_rng()):
            return _key_of([indices, leaves_of(example)])
        restore_rng(before)  # a random example differs between workers: leave it out
        return _key_of(indices)


class _Collate:
    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, chosen: _WindowExamples) -> WindowBatch:
        return WindowBatch(self._collate(chosen.examples), chosen.num_examples, chosen.key)


class _ArraysWindow(Dataset[Any]):
    def __init__(self, arrays: Arrays, window: Window) -> None:
        self._arrays = arrays
        self._window = window

    def __len__(self) -> int:
        return len(self._arrays)

    def __getitem__(self, index: slice | torch.Tensor) -> WindowBatch:
        if isinstance(index, slice):
            found = range(*index.indices(len(self._arrays)))
            begin, end = self._window.bounds(len(found))
            key = _key_of(
                [found.start, found.stop, leaves_of(self._arrays[found.start : found.start + 1])]
            )
            own: slice | torch.Tensor = slice(found.start + begin, found.start + end)
            return WindowBatch(self._arrays[own], len(found), key)
        begin, end = self._window.bounds(len(index))
        key = _key_of([index, leaves_of(self._arrays[index[:1]])])
        return WindowBatch(self._arrays[index[begin:end]], len(index), key)


class _WorkerInit:
    """Starts a worker process of a loader; its ``WorkerInfo`` names the user's dataset."""

    def __init__(self, dataset: Any, begin: Callable[[int], None] | None) -> None:
        self._dataset = dataset
        self._begin = begin

    def __call__(self, worker_id: int) -> None:
        info = get_worker_info()
        if info is not None:
            object.__setattr__(info, "dataset", self._dataset)  # WorkerInfo forbids setattr
        if self._begin is not None:
            self._begin(worker_id)


def _key_of(value: object) -> int:
    return int.from_bytes(batch_hash(value)[:7], "little")


def _has_generators(dataset: object) -> bool:
    """Returns whether random generators can be reached from a dataset."""
    found: list[object] = [dataset]
    seen = {id(dataset)}
    for item in found:  # grows
        if isinstance(item, _GENERATORS):
            return True
        if len(found) > _MAX_SEEN or isinstance(item, (type, ModuleType)):
            continue
        if isinstance(item, FunctionType):
            inner: Sequence[object] = (item.__closure__, item.__defaults__, item.__kwdefaults__)
        elif isinstance(item, (list, tuple)):
            inner = item[:_MAX_ENTRIES]
        else:
            inner = gc.get_referents(item)[:_MAX_ENTRIES]
        for one in inner:
            if id(one) not in seen:
                seen.add(id(one))
                found.append(one)
    return False
