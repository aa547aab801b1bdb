"""Detects datasets that fill the same memory again for their next batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from mirror.values import leaves_of, rebuild_structure

# Up to this size a copy costs about a millisecond.
SMALL_BYTES = 8 * 2**20


class BufferReuse:
    """Copies leaves that lie in memory that a dataset reuses.

    A plain loop has finished a batch when it asks for the next one, so a generator may fill one
    buffer repeatedly. With prefetching several batches are alive, and their parts are views. So
    the addresses of the first batch's leaves are kept, and a leaf that appears at the same address
    again is copied from then on. A dataset with more buffers than live batches needs no copies.
    The first batch is copied if it is small; otherwise the second is read only after the consumer
    has finished it. If a step has several batches, none can wait: all are copied until the check
    is complete. The batches of a list or tuple are never copied.

    Args:
        prefetch: the number of steps that are kept ready.
        batches_per_step: the number of batches in a step.

    Attributes:
        must_wait: whether the next read must wait until the consumer has finished this batch.
    """

    def __init__(self, dataset: object, prefetch: int, batches_per_step: int) -> None:
        self.must_wait = False
        self._can_wait = batches_per_step == 1
        # The number of live batches: those that are ready, in use, and being read.
        self._num_checks = batches_per_step * (prefetch + 2)
        if type(dataset) in (list, tuple) or (prefetch == 0 and self._can_wait):
            self._num_checks = 0
        self._first: list[Any] | None = None
        self._reused: set[int] = set()  # indices of leaves

    def check(self, batch: Any) -> Any:
        """Returns the batch, with copies of the leaves that lie in reused memory."""
        self.must_wait = False
        if not self._num_checks:
            return _copy_leaves(batch, self._reused) if self._reused else batch
        self._num_checks -= 1
        leaves = leaves_of(batch)
        is_first = self._first is None
        if self._first is None:
            self._first = leaves
        else:
            found = {
                i
                for i, (old, new) in enumerate(zip(self._first, leaves, strict=False))
                if _address(old) and _address(old) == _address(new)
            }
            # The next read may overwrite a batch that was not copied.
            self.must_wait = not found <= self._reused
            self._reused |= found
        if not self._num_checks:
            self._first = []
        is_small = sum(map(_num_bytes, leaves)) <= SMALL_BYTES
        if not self._can_wait or (is_first and is_small):
            return _copy_leaves(batch, set(range(len(leaves))))
        self.must_wait = self.must_wait or is_first
        return _copy_leaves(batch, self._reused) if self._reused else batch


def _address(leaf: Any) -> int:
    if isinstance(leaf, np.ndarray):
        return int(leaf.ctypes.data) if leaf.size else 0
    return leaf.data_ptr() if _is_dense(leaf) else 0


def _num_bytes(leaf: Any) -> int:
    return int(leaf.nbytes) if isinstance(leaf, np.ndarray) or _is_dense(leaf) else 0


def _is_dense(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.layout is torch.strided and not leaf.is_nested


def _copy_leaves(batch: Any, indices: set[int]) -> Any:
    def copy(i: int, leaf: Any) -> Any:
        if i in indices and isinstance(leaf, np.ndarray):
            return leaf.copy()
        return leaf.clone() if i in indices and _is_dense(leaf) else leaf

    return rebuild_structure(batch, (copy(*item) for item in enumerate(leaves_of(batch))))
