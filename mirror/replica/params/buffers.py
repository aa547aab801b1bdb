"""Buffers: all mirrored buffers of a strategy, which its replicas start their runs with."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from mirror.errors import StrategyError
from mirror.execution.lifecycle import LifecycleHooks, WhilePending
from mirror.execution.replicas import Replicas
from mirror.replica.params.mirrored_buffer import MirroredBuffer, ReplicatedBuffer
from mirror.replica.params.replicated_params import MirroredTensors, put_in_order

_logger = logging.getLogger("mirror")


class Buffers:
    """The mirrored buffers of a strategy. See [Note: Combined buffers]."""

    def __init__(self, replicas: Replicas, registry: MirroredTensors) -> None:
        self._replicas, self._registry = replicas, registry
        self._by_id: dict[int, ReplicatedBuffer] = {}

    def __iter__(self) -> Iterator[ReplicatedBuffer]:
        return iter(tuple(self._by_id.values()))  # a garbage collection may take some away

    def part(self) -> LifecycleHooks:
        """Returns what gives replicas the combined values, and knows when these are stale."""
        return LifecycleHooks(
            name="buffers",
            prepare=WhilePending(self._by_id, self.give_changed),
            on_run_end=WhilePending(self._by_id, self._note_run),
            sync_idle=self._bring_along,
            on_run_failed=self._equalize,
        )

    def put_in_order(self, keys: Sequence[int]) -> None:
        """Moves the buffers with these ``id``s to the end, in this order."""
        put_in_order(self._by_id, keys)

    def mirror(self, buffer: Tensor, name: str, module: nn.Module) -> ReplicatedBuffer:
        """Turns a buffer into a mirrored one, in place.

        Args:
            name: where it was found, for messages.
            module: the one that holds it: in eval mode its replicas are given what is combined.

        Raises:
            StrategyError: its class cannot be swapped.
        """
        if type(buffer) not in (Tensor, nn.Parameter):
            raise StrategyError(
                f"buffer {name!r} is a {type(buffer).__name__}, a tensor subclass with operations "
                "of its own; mirror takes plain tensors"
            )
        home = self._replicas.places.position_of(buffer.device, name)
        if buffer.device != home:
            buffer.data = buffer.data.to(home)
        record = self._by_id[id(buffer)] = ReplicatedBuffer(buffer, name, module, self._replicas)
        self._registry.own(buffer, self._forgetting())
        buffer._mirrored = record  # type: ignore[attr-defined]
        buffer.__class__ = MirroredBuffer
        return record

    def _forgetting(self) -> Callable[[int], None]:
        alive = weakref.ref(self)

        def forget(key: int) -> None:
            buffers = alive()
            if buffers is not None:
                buffers._by_id.pop(key, None)

        return forget

    def give_changed(self) -> None:
        """Gives the replicas what was written outside, or what an evaluation starts from."""
        # A copy: a garbage collection may take some away.
        given = [buffer for buffer in tuple(self._by_id.values()) if buffer.must_be_given()]
        if given:
            with torch.no_grad():
                for buffer in given:
                    buffer.give()

    def _note_run(self, active: tuple[int, ...]) -> None:
        for buffer in tuple(self._by_id.values()):
            if buffer.looks and len(active) > 1 and buffer.is_written():
                buffer.looks -= 1
                _tell_if_apart([buffer.copies[r] for r in active], buffer)
            buffer.note_run(active)

    def _bring_along(self, source: int, idle: Sequence[int]) -> None:
        with torch.no_grad():
            for buffer in tuple(self._by_id.values()):
                buffer.sync_idle(idle)

    def _equalize(self, begun: tuple[int, ...]) -> None:
        with torch.inference_mode(False), torch.no_grad():
            for buffer in tuple(self._by_id.values()):
                buffer.equalize(begun)


def _tell_if_apart(copies: Sequence[Tensor], buffer: ReplicatedBuffer) -> None:
    """Logs that replicas have left a buffer different, if they have."""
    first = copies[0]
    if all(c.shape == first.shape and torch.equal(c.to(first.device), first) for c in copies):
        return
    buffer.looks = 0
    kept = "the mean of theirs" if buffer.aggregation == "mean" else "the first replica's value"
    _logger.warning(
        "the replicas have left buffer %r different, for each has its part of the batch: what is "
        "kept is %s, which is not what one device has unless it is a mean over examples. Write it "
        "with what all replicas give (all_reduce or all_gather of mirror.get_replica_context()), "
        "or say how to combine it: mirror.set_aggregation(module, name, 'mean'), or 'sum', "
        "'first', 'none'",
        buffer.name,
        kept,
    )
