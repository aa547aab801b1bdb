"""Steps: the batches of one pass, as they go to the replicas."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from mirror.data.adapters import DatasetAdapter, DatasetPass
from mirror.data.buffer_reuse import BufferReuse
from mirror.data.input_options import InputOptions
from mirror.data.join_batches import examples_of, join_batches
from mirror.data.split_batch import batch_size, host_part, is_batched, is_strings, split_batch
from mirror.data.worker_sharding import Window
from mirror.data.worker_slices import Fetched
from mirror.device.side_streams import CopyStreams
from mirror.devices import is_simulated
from mirror.values import PerReplica, children_of, leaves_of, rebuild_node


@dataclass(frozen=True, slots=True)
class Delivery:
    """What the replicas get for one step.

    Attributes:
        batch: with ``PerReplica`` leaves on the replicas' devices.
        sizes: the replicas' numbers of examples.
        num_examples: all, those for other workers included.
        events: what must happen before the batch may be used, see ``CopyStreams``.
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
    """How a dataset's batches become steps: global ones are split, replicas' own ones joined.

    Args:
        window: which replicas these are of those that a global batch is split over.
        joins: whether each batch is for one replica.

    Attributes:
        batches_per_step: how many of the dataset's batches make a step.
        copies: whether parts are copied to devices, which should begin early; otherwise they are
            views, made in the consumer's thread, so that a slow loader's does nothing but load.
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
        return sum(map(examples_of if self._joins else _global_size, batches))

    def assemble(self, batches: Sequence[Any]) -> Delivery:
        """Splits, or joins, the batches of a step, and copies the parts to the devices."""
        num_replicas = len(self.devices)
        if self._joins:
            sizes = (*map(examples_of, batches), *[0] * (num_replicas - len(batches)))
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
            if isinstance(whole, Fetched):  # it begins with the window
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
                pin=self.streams.pinned if self.copies else None,
                copy=self.streams.copy,
            )
        return Delivery(batch, sizes, num_examples, self.streams.departed())


class DistributedStep:
    """The batches of one step, read and perhaps assembled.

    Attributes:
        num_batches: how many of the dataset's batches are in it.
        own_state: the dataset's own state after them, if it has one.
        batches: as they were read.
    """

    __slots__ = (
        "_assembly",
        "_delivery",
        "batches",
        "num_batches",
        "own_state",
    )

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
        step = DistributedStep([_emptied(self.batches[0])], self.own_state, self._assembly)
        step.num_batches = 0
        return step

    def num_examples(self) -> int:
        """Returns the number of examples of all replicas, those of other workers included."""
        if self._delivery is not None:
            return self._delivery.num_examples
        return self._assembly.num_examples(self.batches)

    def delivery(self) -> Delivery:
        """Returns what the replicas get; called once."""
        return self._delivery or self._assembly.assemble(self.batches)


class DistributedSteps:
    """Reads the batches of a pass, one step at a time.

    Calling ``next`` again after an error goes on with the next batch, where the dataset does.

    Attributes:
        first_size: the number of examples of the pass's first step, which only
            ``drop_remainder`` needs; ``None`` before it.
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
        self._read: list[Any] = []  # for a step that is not complete
        self._held: list[DistributedStep] = []
        # Whether copies read the dataset's own memory after they were enqueued: pinned memory.
        # From any other they read it before.
        self._is_read_later = False
        self._error: BaseException | None = None

    @property
    def must_wait(self) -> bool:
        """Whether the next step may be read only when this one is done with."""
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
                self._look_beyond()
        return step

    def _look_beyond(self) -> None:
        """Raises ``StopIteration`` if what was read last is the last."""
        try:
            self._held.append(self._next())
        except StopIteration:
            raise
        except BaseException as error:
            self._error = error  # belongs to the batch after

    def _raise_held(self) -> NoReturn:
        error, self._error = self._error, None
        try:
            assert error is not None
            raise error
        finally:
            del error

    def _next(self) -> DistributedStep:
        if self._is_read_later:
            # To be done with a batch, as a dataset takes it that fills the same memory again.
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
            # Also if no step is made of them: an error may come when some copies are under way.
            self._is_read_later = any(map(_is_pinned, chain(*map(leaves_of, batches))))
        return DistributedStep(batches, self._source.own_state(), self._assembly)

    def end(self) -> None:
        """Lets go of the dataset."""
        self._held.clear()
        self._pass.end()


def _emptied(batch: Any) -> Any:
    """Returns a batch of no examples."""
    batch = batch.part if isinstance(batch, Fetched) else batch
    size = examples_of(batch)

    def emptied(tree: Any) -> Any:
        if is_batched(tree):
            return tree[:0].copy() if isinstance(tree, np.ndarray) else tree[:0].clone()
        if is_strings(tree) and len(tree) == size:
            return tree[:0]
        children = None if isinstance(tree, Tensor) else children_of(tree)
        if children is None:
            return tree
        return rebuild_node(tree, {key: emptied(child) for key, child in children.items()})

    return emptied(batch)


def _global_size(batch: Any) -> int:
    return batch.num_examples if isinstance(batch, Fetched) else batch_size(batch)


def _is_pinned(leaf: Any) -> bool:
    # An array that needs a copy becomes a tensor of other memory, which its first row shows.
    tensor = host_part(leaf[:1] if leaf.ndim else leaf) if isinstance(leaf, np.ndarray) else leaf
    is_dense = isinstance(tensor, Tensor) and tensor.layout is torch.strided
    return is_dense and tensor.device.type == "cpu" and tensor.is_pinned()
