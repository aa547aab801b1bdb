"""Reads the batches of one pass, and assembles the batches of each step for the replicas."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from mirror.data.adapters import DatasetAdapter, DatasetPass
from mirror.data.input_options import InputOptions
from mirror.data.loader_copy import WindowBatch
from mirror.data.split_batch import (
    batch_size,
    count_examples,
    host_part,
    is_batched,
    is_strings,
    join_batches,
    split_batch,
)
from mirror.data.worker_sharding import Window
from mirror.device.streams import CopyStreams
from mirror.devices import is_simulated
from mirror.values import PerReplica, children_of, leaves_of, rebuild_node, rebuild_structure

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


@dataclass(frozen=True, slots=True)
class Delivery:
    """The distributed batch of one step.

    Attributes:
        batch: the batch, with ``PerReplica`` leaves on the replicas' devices.
        sizes: the replicas' numbers of examples.
        num_examples: the number of examples of all workers.
        events: the events that precede any use of the batch, see ``CopyStreams``.
    """

    batch: Any
    sizes: tuple[int, ...]
    num_examples: int
    events: tuple[Any, ...]

    def tensors(self) -> Iterator[Tensor]:
        """Yields the parts of the batch that are tensors."""
        for leaf in leaves_of(self.batch):
            if isinstance(leaf, PerReplica):
                yield from (part for _, part in leaf.parts() if isinstance(part, Tensor))


class Assembly:
    """Assembles steps from a dataset's batches: splits global ones, joins those for one replica.

    Args:
        window: these replicas, among all over which a global batch is split.
        joins: whether each batch is for one replica.

    Attributes:
        batches_per_step: the number of the dataset's batches in a step.
        copies: whether parts are copied to devices, which the reading thread then starts early.
            Otherwise they are views, which the consumer's thread makes.
    """

    def __init__(
        self,
        devices: Sequence[torch.device],
        options: InputOptions,
        window: Window,
        *,
        joins: bool,
    ) -> None:
        self.devices = tuple(devices)
        self.options = options
        self.batches_per_step = len(self.devices) if joins else 1
        self.streams = CopyStreams(self.devices)
        self.copies = not is_simulated(self.devices)
        self._window = window
        self._joins = joins

    def num_examples(self, batches: Sequence[Any]) -> int:
        """Returns the number of examples of a step, those for other workers included."""
        return sum(map(count_examples if self._joins else _global_size, batches))

    def assemble(self, batches: Sequence[Any]) -> Delivery:
        """Splits, or joins, the batches of a step, and copies the parts to the devices."""
        num_replicas = len(self.devices)
        if self._joins:
            sizes = (*map(count_examples, batches), *[0] * (num_replicas - len(batches)))
            num_examples = sum(sizes)
            batch = join_batches(
                batches,
                self.devices,
                sizes,
                weight_of=self.options.weight_of,
                copy=self.streams.copy,
            )
        else:
            whole, window = batches[0], self._window
            num_examples = _global_size(whole)
            sizes = window.sizes(num_examples)
            begin = sum(sizes[: window.first])
            num_read = num_examples
            if isinstance(whole, WindowBatch):  # its first example is the window's first
                whole, begin = whole.part, 0
                num_read = batch_size(whole)
            sizes = sizes[window.first : window.first + num_replicas]
            batch = split_batch(
                whole,
                self.devices,
                sizes=sizes,
                begin=begin,
                num_examples=num_read,
                weight_of=self.options.weight_of,
                pin=self.streams.pin if self.copies else None,
                copy=self.streams.copy,
            )
        return Delivery(batch, sizes, num_examples, self.streams.record_events())


class DistributedStep:
    """The batches of one step, already assembled if parts are copied to devices.

    Attributes:
        num_batches: the number of the dataset's batches in the step.
        own_state: the dataset's own state after these batches, if it has one.
        batches: the batches as they were read.
    """

    __slots__ = ("_assembly", "_delivery", "batches", "num_batches", "own_state")

    def __init__(self, batches: list[Any], own_state: Any, assembly: Assembly) -> None:
        self.num_batches = len(batches)
        self.own_state = own_state
        self._assembly = assembly
        self.batches = batches
        self._delivery: Delivery | None = None
        if assembly.copies:
            self._delivery = assembly.assemble(batches)

    def empty(self) -> DistributedStep:
        """Returns a step without examples, of the structure of this one."""
        step = DistributedStep([_make_empty(self.batches[0])], self.own_state, self._assembly)
        step.num_batches = 0
        return step

    def num_examples(self) -> int:
        """Returns the number of examples of the replicas of all workers."""
        if self._delivery is not None:
            return self._delivery.num_examples
        return self._assembly.num_examples(self.batches)

    def delivery(self) -> Delivery:
        """Returns the distributed batch; called once."""
        return self._delivery or self._assembly.assemble(self.batches)


class DistributedSteps:
    """Reads the batches of a pass, one step at a time.

    A call of ``next`` after an error continues with the next batch, if the dataset can.

    Attributes:
        first_size: the number of examples of the pass's first step, for ``drop_remainder``;
            ``None`` before it.
    """

    def __init__(
        self,
        batches: DatasetPass,
        source: DatasetAdapter,
        assembly: Assembly,
        *,
        first_size: int | None,
    ) -> None:
        self.first_size = first_size
        self._pass = batches
        self._source = source
        self._assembly = assembly
        self._reuse = BufferReuse(
            source.dataset, assembly.options.prefetch, assembly.batches_per_step
        )
        self._read: list[Any] = []  # batches of an incomplete step
        self._held: list[DistributedStep] = []
        # Copies from pinned memory read the dataset's own memory after they were enqueued; from
        # other memory the host reads before.
        self._is_read_later = False
        self._error: BaseException | None = None

    @property
    def must_wait(self) -> bool:
        """Whether the next step may be read only after the consumer has finished this one."""
        return self._reuse.must_wait

    def __next__(self) -> DistributedStep:
        if self._error is not None:
            self._raise_held()
        step = self._held.pop() if self._held else self._next()
        if self._assembly.options.drop_remainder:
            size = step.num_examples()
            if self.first_size is None:
                self.first_size = size
            elif size < self.first_size:
                self._read_next()
        return step

    def _read_next(self) -> None:
        """Reads the next step; raises ``StopIteration`` if there is none."""
        try:
            self._held.append(self._next())
        except StopIteration:
            raise
        except BaseException as error:
            self._error = error  # is raised at the next batch

    def _raise_held(self) -> NoReturn:
        error, self._error = self._error, None
        try:
            assert error is not None
            raise error
        finally:
            del error

    def _next(self) -> DistributedStep:
        if self._is_read_later:
            # A dataset that fills the same memory again expects that the last batch was copied.
            self._assembly.streams.synchronize()
            self._is_read_later = False
        while len(self._read) < self._assembly.batches_per_step:
            try:
                batch = next(self._pass)
            except StopIteration:
                if not self._read:
                    raise
                break
            self._read.append(self._reuse.check(batch))
        batches, self._read = self._read, []
        if self._assembly.copies:
            # Set before the step is made: an error may occur while some copies are in flight.
            self._is_read_later = any(map(_is_pinned, chain(*map(leaves_of, batches))))
        return DistributedStep(batches, self._source.own_state(), self._assembly)

    def end(self) -> None:
        """Ends the pass, and frees its batches."""
        self._held.clear()
        self._pass.end()


def _make_empty(batch: Any) -> Any:
    """Returns a batch of the same structure without examples."""
    batch = batch.part if isinstance(batch, WindowBatch) else batch
    size = count_examples(batch)

    def make_empty(tree: Any) -> Any:
        if is_batched(tree):
            return tree[:0].copy() if isinstance(tree, np.ndarray) else tree[:0].clone()
        if is_strings(tree) and len(tree) == size:
            return tree[:0]
        children = None if isinstance(tree, Tensor) else children_of(tree)
        if children is None:
            return tree
        return rebuild_node(tree, {key: make_empty(child) for key, child in children.items()})

    return make_empty(batch)


def _global_size(batch: Any) -> int:
    return batch.num_examples if isinstance(batch, WindowBatch) else batch_size(batch)


def _is_pinned(leaf: Any) -> bool:
    # The first row of an array shows whether its tensor is a copy in other memory.
    tensor = host_part(leaf[:1] if leaf.ndim else leaf) if isinstance(leaf, np.ndarray) else leaf
    is_dense = isinstance(tensor, Tensor) and tensor.layout is torch.strided
    return is_dense and tensor.device.type == "cpu" and tensor.is_pinned()
