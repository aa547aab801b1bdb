"""Joining batches that were made for one replica each into a distributed batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mirror.data.split_batch import Copy, batch_size, host_part, is_batched, place
from mirror.errors import BatchError, StructureError
from mirror.values import ABSENT, PerReplica, is_number, leaves_of, map_structure


def join_batches(
    batches: Sequence[Any],
    devices: Sequence[torch.device],
    sizes: Sequence[int],
    *,
    weight_of: Callable[[Any], Any] | None = None,
    copy: Copy = Tensor.to,
) -> Any:
    """Gives the batches to the replicas, in order, each on its device.

    Tensors, numpy arrays and numbers become ``PerReplica``; another leaf stays as it is if all
    batches have the very same object there. Replicas beyond the batches have no part.

    Args:
        batches: at most one per replica.
        sizes: the batches' numbers of examples, see ``examples_of``; the ``weights``, unless
            ``weight_of`` gives others.

    Raises:
        BatchError: the batches differ in structure.
        ValueError: ``weight_of`` gave no finite number >= 0.
    """
    missing = [ABSENT] * (len(devices) - len(batches))

    def join(*leaves: Any) -> Any:
        first = leaves[0]
        if not isinstance(first, Tensor) and not is_number(first):
            if all(leaf is first for leaf in leaves):
                return first
        parts = [host_part(leaf) if isinstance(leaf, np.ndarray) else leaf for leaf in leaves]
        return PerReplica([*parts, *missing])

    try:
        parts = map_structure(join, *batches)
    except StructureError as error:
        raise BatchError(
            f"the batches of one step must have one structure, one batch per replica; {error}"
        ) from None
    return place(parts, devices, sizes, weight_of=weight_of, copy=copy)


def examples_of(batch: Any) -> int:
    """Returns a replica's number of examples; a batch of nothing but single values counts 1.

    Raises:
        BatchError: see ``batch_size``.
    """
    return batch_size(batch) if any(is_batched(leaf) for leaf in leaves_of(batch)) else 1
