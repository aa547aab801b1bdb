"""Per-worker datasets: in the coordinator's process a name, on each worker an iterator."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from mirror.base.no_copy import NoCopy
from mirror.data.input_options import InputContext
from mirror.errors import StrategyError


class PerWorkerDataset(NoCopy):
    """What ``create_per_worker_dataset`` returns: every worker has its own.

    As an argument of ``schedule`` it is the worker's next batch; ``iter(dataset)`` there is the
    worker's iterator, on which a step calls ``next`` as in TensorFlow.
    """

    _instead = "a step that is scheduled takes it as an argument"

    def __init__(self, index: int, owner: object) -> None:
        self.index, self.owner = index, owner

    def __iter__(self) -> PerWorkerIterator:
        return PerWorkerIterator(self)


class PerWorkerIterator(NoCopy):
    """Stands for a worker's iterator in what is scheduled."""

    _instead = PerWorkerDataset._instead

    def __init__(self, dataset: PerWorkerDataset) -> None:
        self.dataset = dataset

    def __iter__(self) -> PerWorkerIterator:
        return self

    def __next__(self) -> Any:
        raise StrategyError(
            "a per-worker dataset is read by workers: pass it, or iter(dataset), to "
            "coordinator.schedule, and call next(iterator) in the step"
        )


class PerWorkerValues:
    """One value for each worker; a step that is scheduled with it gets its worker's.

    Args:
        values: by the worker's index.
    """

    def __init__(self, values: Iterable[Any]) -> None:
        self.values = tuple(values)

    def __repr__(self) -> str:
        return f"PerWorkerValues({list(self.values)!r})"


class WorkerIterator:
    """A worker's dataset.

    Args:
        make: an iterable, or a function of nothing or an InputContext that returns one.
        noted: called with the number of examples of each batch that is drawn.
    """

    def __init__(self, make: Any, context: InputContext, noted: Callable[[int], None]) -> None:
        dataset = _called(make, context) if callable(make) else make
        if not isinstance(dataset, Iterable):
            raise TypeError(
                "create_per_worker_dataset takes a dataset, or a function that returns one: "
                f"something to iterate over; got a {type(dataset).__name__}"
            )
        self._iterator: Iterator[Any] = iter(dataset)
        self._noted = noted
        self._worker = context.input_pipeline_id
        self._num_drawn = 0

    def __iter__(self) -> WorkerIterator:
        return self

    def __next__(self) -> Any:
        try:
            batch = next(self._iterator)
        except StopIteration:
            raise StopIteration(
                f"the dataset of worker {self._worker} has no batch left after {self._num_drawn}; "
                "give create_per_worker_dataset one that does not end, for instance "
                "mirror.data.from_arrays(arrays, batch_size, repeat=True), or schedule fewer steps"
            ) from None
        self._num_drawn += 1
        self._noted(num_examples(batch) or 0)
        return batch


def num_examples(batch: Any) -> int | None:
    """Returns the length of a batch's first tensor or array that has one."""
    if isinstance(batch, torch.Tensor) or hasattr(batch, "__array__"):
        return int(batch.shape[0]) if batch.ndim else None
    if isinstance(batch, dict):
        batch = tuple(batch.values())
    if isinstance(batch, (tuple, list)):
        found = (num_examples(entry) for entry in batch)
        return next((count for count in found if count is not None), None)
    return None


def _called(make: Callable[..., Any], context: InputContext) -> Any:
    try:
        takes = inspect.signature(make).parameters
    except (TypeError, ValueError):  # a builtin
        return make()
    needed = [
        p
        for p in takes.values()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty
    ]
    return make(context) if needed else make()
