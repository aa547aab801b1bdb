"""Indices: a copy of a loader whose samplers can be skipped, and its examples chosen."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from mirror.data.worker_sharding import Window
from mirror.data.worker_slices import fetch_windows


class Indices:
    """Stands for a loader's (batch) sampler: skips, and draws its seed when it is primed."""

    def __init__(self, sampler: Iterable[Any]) -> None:
        self._sampler = sampler
        self._iterator: Iterator[Any] = iter(())
        self._primed: list[Any] = []
        self.num_skipped = 0
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
        return next(self._iterator)

    def prime(self) -> None:
        """Reads the first index now: a sampler draws from the global generator when it begins."""
        try:
            self._primed = [next(self)]
        except StopIteration:
            self._iterator = iter(())


def copy_of(loader: DataLoader[Any], window: Window | None) -> DataLoader[Any]:
    """Returns a copy of a loader for passes of ours, whose ``Indices`` can be skipped."""
    clone = copy.copy(loader)
    clone._iterator = None  # its persistent workers are not ours
    if not isinstance(loader.dataset, IterableDataset):
        # Past the setter, which forbids it: only the loader's own iterator asks for indices.
        name = "sampler" if loader.batch_sampler is None else "batch_sampler"
        clone.__dict__[name] = Indices(getattr(loader, name))
    if window is not None:
        fetch_windows(clone, window)
    return clone


def skip(batches: Iterator[Any], count: int) -> None:
    """Reads what was consumed; raises ``ValueError`` if there is not as much."""
    ended = object()
    for k in range(count):
        if next(batches, ended) is ended:
            raise ValueError(
                f"a dataset must have the batches that the loaded state counts as consumed, "
                f"{count}; this one ended after {k}; resume with the dataset that was saved"
            )
