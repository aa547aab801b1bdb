"""Windows of batches: a loader that fetches only the examples that are for this worker.

[Note: Windows]
All workers iterate the same global batches, and each needs a part of every one. Where a loader
fetches example by example, and only stacks them, what it makes of a part is the part of what it
makes of the whole. So its samplers go on as they are, and say which examples are in a batch; but
the dataset, in whatever process the loader reads it, is asked for those of the window alone.

Whoever draws random numbers while it fetches an example (a random crop) would draw other ones if
it fetched fewer. So the first time that the global streams of the process have moved, they are put
back and all examples are fetched, from then on always; with generators of its own in the dataset,
from the beginning. In the process that trains, where others draw beside what is read ahead, only
the first batch of a pass is compared: it is read while nobody else does anything.

What is read otherwise is read whole, and every worker takes its window of it: a dataset that
fetches whole batches (``__getitems__``, ``batch_size=None``), a ``collate_fn`` of the user's
(which may pad to the longest example), iterable datasets, classes of loaders other than torch's.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Sequence
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

from mirror.data.batch_hash import batch_hash
from mirror.data.from_arrays import Arrays
from mirror.data.rng_state import capture_streams, restore_streams, same_streams
from mirror.data.worker_sharding import Window
from mirror.values import leaves_of

_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_MAX_SEEN = 10_000  # objects of a dataset that are looked at
_MAX_ENTRIES = 50  # of each container


class Fetched(NamedTuple):
    """The examples of a window.

    Attributes:
        part: these; one example of another window, if there is none in this one.
        num_examples: how many are in the whole batch.
        key: says which.
    """

    part: Any
    num_examples: int
    key: int


class _Chosen(NamedTuple):
    """Examples on their way to ``collate_fn``."""

    examples: list[Any]
    num_examples: int
    key: int


def fetch_windows(loader: DataLoader[Any], window: Window) -> None:
    """Makes a loader of our own give ``Fetched`` parts, where that is as good as whole batches."""
    dataset: Any = loader.dataset
    changed: dict[str, Any] = {}
    if isinstance(dataset, Arrays) and loader.batch_size is None:
        changed["dataset"] = _ArraysWindow(dataset, window)
    elif _fetches_examples(loader):
        changed["dataset"] = WindowDataset(dataset, window, reads_all=_has_generators(dataset))
        changed["collate_fn"] = _Collate(loader.collate_fn)
    if changed and loader.num_workers:
        changed["worker_init_fn"] = _Begin(dataset, loader.worker_init_fn)
    # Past the setter, which forbids it: the loader has not begun.
    loader.__dict__.update(changed)


def _fetches_examples(loader: DataLoader[Any]) -> bool:
    dataset: Any = loader.dataset
    if isinstance(dataset, IterableDataset) or loader.batch_sampler is None:
        return False
    while type(dataset) is Subset:
        dataset = dataset.dataset
    at_once = getattr(dataset, "__getitems__", None)
    return at_once is None and loader.collate_fn is default_collate


class WindowDataset(Dataset[Any]):
    """A map-style dataset that is asked for whole batches, and fetches what is in the window.

    Args:
        reads_all: whether to fetch everything. See [Note: Windows].
    """

    def __init__(self, dataset: Any, window: Window, *, reads_all: bool) -> None:
        self._dataset = dataset
        self._window = window
        self._reads_all = reads_all
        self._is_first = True  # that was read in this process

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: Any) -> Any:
        return self._dataset[index]

    def __getitems__(self, indices: Sequence[Any]) -> _Chosen:
        indices = list(indices)
        begin, end = self._window.bounds(len(indices))
        if begin == end:  # collated, and then cut off
            begin, end = 0, min(1, len(indices))
        key = self._key(indices)
        compares = self._is_first or get_worker_info() is not None
        self._is_first = False
        if not self._reads_all:
            before = capture_streams() if compares else None
            own = [self._dataset[index] for index in indices[begin:end]]
            if before is None or same_streams(before, capture_streams()):
                return _Chosen(own, len(indices), key)
            restore_streams(before)
            self._reads_all = True
        return _Chosen([self._dataset[i] for i in indices][begin:end], len(indices), key)

    def _key(self, indices: list[Any]) -> int:
        """Returns what tells batches apart: the indices, and, of the first, an example."""
        if not self._is_first or self._reads_all or not indices:
            return _key_of(indices)
        before = capture_streams()
        example: Any = self._dataset[indices[0]]
        if same_streams(before, capture_streams()):
            return _key_of([indices, leaves_of(example)])
        restore_streams(before)  # and drawn examples may differ
        return _key_of(indices)


class _Collate:
    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, chosen: _Chosen) -> Fetched:
        return Fetched(self._collate(chosen.examples), chosen.num_examples, chosen.key)


class _ArraysWindow(Dataset[Any]):
    def __init__(self, arrays: Arrays, window: Window) -> None:
        self._arrays = arrays
        self._window = window

    def __len__(self) -> int:
        return len(self._arrays)

    def __getitem__(self, index: slice | torch.Tensor) -> Fetched:
        if isinstance(index, slice):
            found = range(*index.indices(len(self._arrays)))
            begin, end = self._window.bounds(len(found))
            key = _key_of(
                [found.start, found.stop, leaves_of(self._arrays[found.start : found.start + 1])]
            )
            own: slice | torch.Tensor = slice(found.start + begin, found.start + end)
            return Fetched(self._arrays[own], len(found), key)
        begin, end = self._window.bounds(len(index))
        key = _key_of([index, leaves_of(self._arrays[index[:1]])])
        return Fetched(self._arrays[index[begin:end]], len(index), key)


class _Begin:
    """Begins a worker process of a loader, which sees its dataset as the user made it."""

    def __init__(self, dataset: Any, begin: Callable[[int], None] | None) -> None:
        self._dataset = dataset
        self._begin = begin

    def __call__(self, worker_id: int) -> None:
        info = get_worker_info()
        if info is not None:
            object.__setattr__(info, "dataset", self._dataset)  # it forbids changes
        if self._begin is not None:
            self._begin(worker_id)


def _key_of(value: object) -> int:
    return int.from_bytes(batch_hash(value)[:7], "little")


def _has_generators(dataset: object) -> bool:
    """Whether a dataset holds random generators, itself or in what it is made of."""
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
