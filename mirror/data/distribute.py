"""DistributedDataset: an iterable of global batches, seen as batches split over the replicas."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Sized
from typing import Any, cast

import torch

from mirror.data.split import split_batch


class DistributedDataset:
    """What ``strategy.distribute_dataset`` returns; iterating splits one global batch after other.

    It can be iterated as often as the dataset can: a ``DataLoader`` again and again, a generator
    once. Batches are split when they are asked for.
    """

    def __init__(self, dataset: Iterable[Any], devices: Sequence[torch.device]) -> None:
        """Splits the batches of ``dataset`` over ``devices``, see ``split_batch``.

        Raises:
            TypeError: the dataset has no ``__iter__``.
        """
        if not isinstance(dataset, Iterable):
            raise TypeError(
                "a dataset must be an iterable of global batches, a DataLoader for instance; got "
                f"a {type(dataset).__name__}; wrap a map-style dataset in "
                "torch.utils.data.DataLoader(dataset, batch_size=...)"
            )
        self._dataset = dataset
        self._devices = tuple(devices)

    def __iter__(self) -> Iterator[Any]:
        """Yields each global batch with ``PerReplica`` leaves.

        Raises:
            BatchError: the leaves of a batch cannot be split together.
        """
        for batch in self._dataset:
            yield split_batch(batch, self._devices)

    def __len__(self) -> int:
        """Returns the dataset's own length; raises its ``TypeError`` where it has none."""
        return len(cast(Sized, self._dataset))
