"""Steps: the batches of one pass, as they go to the replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from mirror.accelerator.streams import CopyStreams
from mirror.data.join import examples_of, join_batches
from mirror.data.options import InputOptions
from mirror.data.reuse import Reuse
from mirror.data.source import Pass, Source
from mirror.data.split import batch_size, host_part, split_batch, split_sizes
from mirror.devices import is_simulated
from mirror.values import leaves_of


@dataclass(frozen=True, slots=True)
class Delivery:
    """What the replicas get for one step.

    Attributes:
        batch: with ``PerReplica`` leaves on the replicas' devices.
        sizes: the replicas' numbers of examples.
        events: what must happen before the batch may be used, see ``CopyStreams``.
    """

    batch: Any
    sizes: tuple[int, ...]
    events: tuple[Any, ...]


class Assembly:
    """How a dataset's batches become steps: global ones are split, replicas' own ones joined.

    Args:
        shares: gives the shares of unlike devices at the time, ``None`` for equal ones.
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
        shares: Callable[[], Sequence[float] | None],
        *,
        joins: bool,
    ) -> None:
        self.devices = tuple(devices)
        self.options = options
        self.batches_per_step = len(self.devices) if joins else 1
        self.streams = CopyStreams(self.devices)
        self.copies = not is_simulated(self.devices)
        self._shares = shares
        self._joins = joins

    def num_examples(self, batches: Sequence[Any]) -> int:
        """Returns the number of examples of a step."""
        return sum(map(examples_of if self._joins else batch_size, batches))

    def assemble(self, batches: Sequence[Any]) -> Delivery:
        """Splits, or joins, the batches of a step, and copies the parts to the devices."""
        num_replicas = len(self.devices)
        if self._joins:
            sizes = (*map(examples_of, batches), *[0] * (num_replicas - len(batches)))
            batch = join_batches(
                batches,
                self.devices,
                sizes,
                weight_of=self.options.weight_of,
                copy=self.streams.copy,
            )
        else:
            sizes = split_sizes(batch_size(batches[0]), num_replicas, self._shares())
            batch = split_batch(
                batches[0],
                self.devices,
                sizes=sizes,
                weight_of=self.options.weight_of,
                pin=self.streams.pinned if self.copies else None,
                copy=self.streams.copy,
            )
        return Delivery(batch, sizes, self.streams.departed())


class Step:
    """The batches of one step, read and perhaps assembled.

    Attributes:
        num_batches: how many of the dataset's batches are in it.
        own_state: the dataset's own state after them, if it has one.
    """

    __slots__ = (
        "_assembly",
        "_batches",
        "_delivery",
        "num_batches",
        "own_state",
    )

    def __init__(self, batches: list[Any], own_state: Any, assembly: Assembly) -> None:
        self.num_batches = len(batches)
        self.own_state = own_state
        self._assembly = assembly
        self._batches = batches
        self._delivery: Delivery | None = None
        if assembly.copies:
            self._delivery = assembly.assemble(batches)

    def num_examples(self) -> int:
        """Returns the number of examples of all replicas."""
        if self._delivery is not None:
            return sum(self._delivery.sizes)
        return self._assembly.num_examples(self._batches)

    def delivery(self) -> Delivery:
        """Returns what the replicas get; called once."""
        return self._delivery or self._assembly.assemble(self._batches)


class Steps:
    """Reads the batches of a pass, one step at a time.

    Calling ``next`` again after an error goes on with the next batch, where the dataset does.

    Attributes:
        first_size: the number of examples of the pass's first step, which only
            ``drop_remainder`` needs; ``None`` before it.
    """

    def __init__(
        self, batches: Pass, source: Source, assembly: Assembly, *, first_size: int | None
    ) -> None:
        self.first_size = first_size
        self._pass = batches
        self._source = source
        self._assembly = assembly
        self._reuse = Reuse(source.dataset, assembly.options.prefetch, assembly.batches_per_step)
        self._read: list[Any] = []  # for a step that is not complete
        self._held: list[Step] = []
        # Whether copies read the dataset's own memory after they were enqueued: pinned memory.
        # From any other they read it before.
        self._is_read_later = False
        self._error: BaseException | None = None

    @property
    def must_wait(self) -> bool:
        """Whether the next step may be read only when this one is done with."""
        return self._reuse.must_wait

    def __next__(self) -> Step:
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

    def _next(self) -> Step:
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
            self._read.append(self._reuse.checked(batch))
        batches, self._read = self._read, []
        if self._assembly.copies:
            # Also if no step is made of them: an error may come when some copies are under way.
            self._is_read_later = any(map(_is_pinned, chain(*map(leaves_of, batches))))
        return Step(batches, self._source.own_state(), self._assembly)

    def end(self) -> None:
        """Lets go of the dataset."""
        self._held.clear()
        self._pass.end()


def _is_pinned(leaf: Any) -> bool:
    # An array that needs a copy becomes a tensor of other memory, which its first row shows.
    tensor = host_part(leaf[:1] if leaf.ndim else leaf) if isinstance(leaf, np.ndarray) else leaf
    is_dense = isinstance(tensor, Tensor) and tensor.layout is torch.strided
    return is_dense and tensor.device.type == "cpu" and tensor.is_pinned()
