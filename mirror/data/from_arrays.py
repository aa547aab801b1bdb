"""Batches of arrays that are in memory."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from mirror.data.split_batch import batch_size as num_examples_of
from mirror.data.split_batch import is_batched
from mirror.errors import short_repr
from mirror.values import is_int, map_structure

Index = slice | Tensor


def from_arrays(
    arrays: Any,
    batch_size: int,
    shuffle: bool = False,
    seed: int | None = None,
    *,
    repeat: bool | int | None = None,
) -> DataLoader[Any]:
    """Returns a ``DataLoader`` over the examples of arrays that are in memory.

    Whole batches are taken at once, at the speed of a copy. Batches have their own memory, so
    writes to a batch never reach the arrays.

    Args:
        arrays: tensors or numpy arrays that share their first dimension, nested in tuples, lists,
            dicts, namedtuples or dataclasses; batches have the same structure. Other leaves are
            in every batch unchanged.
        batch_size: the number of examples in a batch; the last batch may have fewer.
        shuffle: whether every pass has a new random order.
        seed: the seed of these orders; ``None`` draws them from torch's global generator.
        repeat: the number of epochs in a pass over the loader. ``None`` and ``False`` are one
            epoch. ``True`` never ends, and such a loader has no ``len()``. No batch has examples
            of two epochs, so the last one of each may be smaller. With ``shuffle`` every epoch
            has its own order; with a seed these are the orders of as many passes without
            ``repeat``.

    Raises:
        BatchError: the arrays differ in length, or there is no array.
        ValueError: ``batch_size`` is not an int >= 1, ``shuffle`` is not a bool, ``seed`` is not
            an int of 64 bits, or ``repeat`` is neither ``None``, a bool nor an int >= 1.
    """
    if not is_int(batch_size) or batch_size < 1:
        raise ValueError(f"batch_size must be an int >= 1, got {short_repr(batch_size)}")
    if not isinstance(shuffle, bool):
        raise ValueError(
            f"shuffle must be a bool, got {short_repr(shuffle)}; a seed is passed as seed="
        )
    if seed is not None and not (is_int(seed) and -(2**63) <= seed < 2**64):
        raise ValueError(f"seed must be an int of 64 bits or None, got {short_repr(seed)}")
    if not (repeat is None or isinstance(repeat, bool) or (is_int(repeat) and repeat >= 1)):
        raise ValueError(
            "repeat must be a number of epochs, an int >= 1, or True for batches that never end, "
            f"or None for one epoch; got {short_repr(repeat)}"
        )
    num_epochs = None if repeat is True else int(repeat or 1)
    num_examples = num_examples_of(arrays)
    generator = None if seed is None else torch.Generator().manual_seed(int(seed))
    indices = _Indices(
        num_examples, int(batch_size), shuffle=shuffle, generator=generator, num_epochs=num_epochs
    )
    return DataLoader(
        Arrays(arrays, num_examples), batch_size=None, sampler=indices, collate_fn=_pass_through
    )


class Arrays(Dataset[Any]):
    """A dataset of arrays, indexed by a slice or a tensor of indices."""

    def __init__(self, arrays: Any, num_examples: int) -> None:
        self._arrays = arrays
        self._num_examples = num_examples

    def __len__(self) -> int:
        return self._num_examples

    def __getitem__(self, index: Index) -> Any:
        return map_structure(lambda leaf: _take(leaf, index), self._arrays)


class _Indices(Sampler[Index]):
    """The batches of a pass, as slices or tensors of indices.

    Args:
        num_epochs: the number of epochs in a pass; ``None`` for a pass that never ends.
    """

    def __init__(
        self,
        num_examples: int,
        batch_size: int,
        *,
        shuffle: bool,
        generator: torch.Generator | None,
        num_epochs: int | None,
    ) -> None:
        self.generator = generator
        self._num_examples = num_examples
        self.batch_size = batch_size
        self._shuffle = shuffle
        self.num_epochs = num_epochs

    @property
    def num_whole_batches(self) -> int | None:
        """The number of batches as large as the first; ``None`` if several batches are smaller."""
        if self.num_epochs is None:
            return None
        is_even = not self._num_examples % self.batch_size
        if is_even or self._num_examples < self.batch_size:
            return len(self)
        return len(self) - 1 if self.num_epochs == 1 else None

    def __len__(self) -> int:
        if self.num_epochs is None:
            raise TypeError("a loader of from_arrays(repeat=True) never ends: it has no len()")
        return self.num_epochs * -(-self._num_examples // self.batch_size)

    def __iter__(self) -> Iterator[Index]:
        starts = range(0, self._num_examples, self.batch_size)
        orders = self._orders() if self._shuffle else None
        for _ in itertools.count() if self.num_epochs is None else range(self.num_epochs):
            if not starts:
                return
            if orders is None:
                yield from (slice(start, start + self.batch_size) for start in starts)
            else:
                order = next(orders)
                yield from (order[start : start + self.batch_size] for start in starts)

    def _orders(self) -> Iterator[Tensor]:
        """Yields the order of each epoch of a pass.

        All draws from a shared generator happen before the first order. Later orders come from a
        private generator: the reader may draw them ahead of its consumer, and the number of
        draws from a shared generator would then depend on timing.
        """
        draw = functools.partial(torch.randperm, self._num_examples)
        if self.num_epochs == 1:
            yield draw(generator=self.generator)
            return
        own = torch.Generator()
        if self.generator is None:
            own.manual_seed(int(torch.empty((), dtype=torch.int64).random_()))
        else:
            own.set_state(self.generator.get_state())
            # The next pass continues after this one; after an endless one, an epoch later.
            for _ in range(self.num_epochs or 1):
                draw(generator=self.generator)
        while True:
            yield draw(generator=own)


def _take(leaf: Any, index: Index) -> Any:
    if not is_batched(leaf):
        return leaf.clone() if isinstance(leaf, Tensor) else leaf
    if isinstance(leaf, np.ndarray):
        return leaf[index].copy() if isinstance(index, slice) else leaf[index.numpy()]
    if isinstance(index, slice):
        return leaf[index].clone()
    return leaf.index_select(0, index.to(leaf.device))


def _pass_through(batch: Any) -> Any:
    return batch
