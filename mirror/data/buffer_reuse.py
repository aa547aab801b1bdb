"""Reuse: seeing that a dataset fills the same memory again for its next batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from mirror.values import leaves_of, rebuild_structure

# Up to this size a copy costs about a millisecond.
SMALL_BYTES = 8 * 2**20


class BufferReuse:
    """Copies what a dataset yields in memory that it uses again, which reading ahead overwrites.

    A plain loop is done with a batch when it asks for the next one, so a generator may fill one
    buffer over and over. Here several batches are alive, and their parts are views. So the first
    batch is kept, and a leaf that comes at the same address again is copied from then on; with
    more buffers than batches are alive at once nothing needs to be done. The first batch itself
    is copied if it is small; otherwise the second one is not read before it is done with. Where
    several batches make a step nothing can wait, and all are copied until it is known.

    The batches of a list are there anyway; each is what it is in a plain loop.

    Args:
        prefetch: how many steps are ready at once.
        batches_per_step: how many batches are in one.

    Attributes:
        must_wait: whether nothing may be read before the consumer is done with this batch.
    """

    def __init__(self, dataset: object, prefetch: int, batches_per_step: int) -> None:
        self.must_wait = False
        self._can_wait = batches_per_step == 1
        # As many as are alive: those ready, the one in use, and the one being read.
        self._num_checks = batches_per_step * (prefetch + 2)
        if type(dataset) in (list, tuple) or (prefetch == 0 and self._can_wait):
            self._num_checks = 0
        self._first: list[Any] | None = None
        self._reused: set[int] = set()  # places among the leaves

    def check(self, batch: Any) -> Any:
        """Returns the batch, with copies of the leaves whose memory will be written again."""
        self.must_wait = False
        if not self._num_checks:
            return _copied(batch, self._reused) if self._reused else batch
        self._num_checks -= 1
        leaves = leaves_of(batch)
        is_first = self._first is None
        if self._first is None:
            self._first = leaves
        else:
            found = {
                place
                for place, (old, new) in enumerate(zip(self._first, leaves, strict=False))
                if _address(old) and _address(old) == _address(new)
            }
            # Batches read before may lie in the memory that comes next.
            self.must_wait = not found <= self._reused
            self._reused |= found
        if not self._num_checks:
            self._first = []
        is_small = sum(map(_num_bytes, leaves)) <= SMALL_BYTES
        if not self._can_wait or (is_first and is_small):
            return _copied(batch, set(range(len(leaves))))
        self.must_wait = self.must_wait or is_first
        return _copied(batch, self._reused) if self._reused else batch


def _address(leaf: Any) -> int:
    if isinstance(leaf, np.ndarray):
        return int(leaf.ctypes.data) if leaf.size else 0
    return leaf.data_ptr() if _is_dense(leaf) else 0


def _num_bytes(leaf: Any) -> int:
    return int(leaf.nbytes) if isinstance(leaf, np.ndarray) or _is_dense(leaf) else 0


def _is_dense(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.layout is torch.strided and not leaf.is_nested


def _copied(batch: Any, places: set[int]) -> Any:
    def copy(place: int, leaf: Any) -> Any:
        if place in places and isinstance(leaf, np.ndarray):
            return leaf.copy()
        return leaf.clone() if place in places and _is_dense(leaf) else leaf

    return rebuild_structure(batch, (copy(*item) for item in enumerate(leaves_of(batch))))
