"""Per-worker datasets: a reference in the coordinator's process, an iterator on each worker."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from mirror.base.process_bound import NoCopy
from mirror.data.input_options import InputContext
from mirror.errors import StrategyError
from mirror.values import leaves_of


class PerWorkerDataset(NoCopy):
    """The result of ``create_per_worker_dataset``; each worker has its own dataset.

    As an argument of ``schedule``, it becomes the worker's next batch. ``iter(dataset)`` becomes
    the worker's iterator, and the step calls ``next`` on it, as in TensorFlow.
    """

    _instead = "pass it to a scheduled step as an argument"

    def __init__(self, index: int, owner: object) -> None:
        self.index, self.owner = index, owner

    def __iter__(self) -> PerWorkerIterator:
        return PerWorkerIterator(self)


class PerWorkerIterator(NoCopy):
    """A reference to each worker's iterator, for arguments of ``schedule``."""

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
    """One value for each worker; as an argument of a step, it becomes the worker's value.

    Args:
        values: by the worker's index.
    """

    def __init__(self, values: Iterable[Any]) -> None:
        self.values = tuple(values)

    def __repr__(self) -> str:
        return f"PerWorkerValues({list(self.values)!r})"


class WorkerIterator:
    """The iterator of a dataset, on its worker.

    Args:
        dataset: an iterable, or a function that returns one and takes no argument or the context.
        on_batch: called with the number of examples of each batch that is drawn.
    """

    def __init__(
        self, dataset: Any, context: InputContext, on_batch: Callable[[int], None]
    ) -> None:
        if callable(dataset):
            dataset = _call_with_context(dataset, context)
        if not isinstance(dataset, Iterable):
            raise TypeError(
                "create_per_worker_dataset takes a dataset, or a function that returns one: "
                f"something to iterate over; got a {type(dataset).__name__}"
            )
        self._iterator: Iterator[Any] = iter(dataset)
        self._on_batch = on_batch
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
                "pass an endless one to create_per_worker_dataset, for instance "
                "mirror.data.from_arrays(arrays, batch_size, repeat=True), or schedule fewer steps"
            ) from None
        self._num_drawn += 1
        self._on_batch(num_examples(batch) or 0)
        return batch


def num_examples(batch: Any) -> int | None:
    """Returns the length of a batch's first tensor or array; None if there is none."""
    arrays = (leaf for leaf in leaves_of(batch) if hasattr(leaf, "__array__") and leaf.ndim)
    return next((len(array) for array in arrays), None)


def _call_with_context(function: Callable[..., Any], context: InputContext) -> Any:
    """Calls a function with the context if it has a required parameter, or without."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # a builtin
        return function()
    required = [
        p
        for p in parameters.values()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty
    ]
    return function(context) if required else function()
