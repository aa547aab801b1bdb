"""All mirrored buffers of a strategy: what runs start with, and what is combined after them.

``Buffers`` mirrors buffers in place and distributes their combined values, see
[Note: Combined buffers]. ``local_buffers`` and ``set_local_buffers`` save and restore the
replicas' own values for checkpoints. Otherwise a resumed run would start with the combined value
on every replica, and would differ by rounding from a run that was never interrupted.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mirror.errors import StrategyError
from mirror.execution.lifecycle import LifecycleHooks, WhilePending
from mirror.execution.replicas import Replicas
from mirror.replica.params.mirrored_buffer import MirroredBuffer, ReplicatedBuffer
from mirror.replica.params.replicated_params import MirroredTensors, put_in_order

_logger = logging.getLogger("mirror")


class Buffers:
    """The mirrored buffers of a strategy."""

    def __init__(self, replicas: Replicas, registry: MirroredTensors) -> None:
        self._replicas, self._registry = replicas, registry
        self._by_id: dict[int, ReplicatedBuffer] = {}

    def __iter__(self) -> Iterator[ReplicatedBuffer]:
        return iter(tuple(self._by_id.values()))  # a garbage collection may remove entries

    def part(self) -> LifecycleHooks:
        """Returns the hooks that distribute combined values, and record the replicas' changes."""
        return LifecycleHooks(
            name="buffers",
            prepare=WhilePending(self._by_id, self.distribute_changed),
            on_run_end=WhilePending(self._by_id, self._on_run_end),
            sync_idle=self._sync_idle,
            on_run_failed=self._equalize,
        )

    def put_in_order(self, keys: Sequence[int]) -> None:
        """Moves the buffers with these ``id``s to the end, in this order."""
        put_in_order(self._by_id, keys)

    def mirror(self, buffer: Tensor, name: str, module: nn.Module) -> ReplicatedBuffer:
        """Mirrors a buffer in place: the object stays the same.

        Args:
            name: the buffer's path, for messages.
            module: the module that holds it; in eval mode its runs start from combined values.

        Raises:
            StrategyError: the buffer is a tensor subclass.
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
        self._registry.own(buffer, self._on_gone())
        buffer._mirrored = record  # type: ignore[attr-defined]
        buffer.__class__ = MirroredBuffer
        return record

    def _on_gone(self) -> Callable[[int], None]:
        reference = weakref.ref(self)

        def forget(key: int) -> None:
            buffers = reference()
            if buffers is not None:
                buffers._by_id.pop(key, None)

        return forget

    def distribute_changed(self) -> None:
        """Distributes values that were written outside ``run``, or that an evaluation needs."""
        # A copy of the dict: a garbage collection may remove entries.
        changed = [buffer for buffer in tuple(self._by_id.values()) if buffer.must_distribute()]
        if changed:
            with torch.no_grad():
                for buffer in changed:
                    buffer.distribute()

    def combine_workers(self) -> None:
        """Combines what the last run may have changed over all workers; all workers call this.

        It is called when an outermost run ends, because there every worker arrives. Reads are then
        local, for example when only the chief writes a file.
        """
        changed = [buffer for buffer in self if buffer.must_combine_workers()]
        if not changed:
            return
        workers = self._replicas.workers
        with torch.inference_mode(False), torch.no_grad():
            own = [buffer.local_aggregate() for buffer in changed]
            signature = [
                (buffer.name, buffer.aggregation, str(value.dtype), tuple(value.shape))
                for buffer, (value, _) in zip(changed, own, strict=True)
            ]
            counts = [float(count) for _, count in own]
            messages = workers.exchange_tensors(
                f"{len(changed)} buffers that a run has changed",
                signature,
                [value for value, _ in own],
                [workers.weight, *counts],
            )
            # A worker without examples runs too, because all workers must arrive here; its values
            # count in sums only.
            with_examples = [message for message in messages if message.numbers[0]] or messages
            for i, buffer in enumerate(changed):
                counted = messages if buffer.aggregation == "sum" else with_examples
                buffer.combine_workers([(m.tensors[i], m.numbers[i + 1]) for m in counted])

    def _on_run_end(self, active: tuple[int, ...]) -> None:
        for buffer in tuple(self._by_id.values()):
            if buffer.num_checks and len(active) > 1 and buffer.is_written():
                buffer.num_checks -= 1
                _warn_if_different([buffer.copies[r] for r in active], buffer)
            buffer.note_run(active)

    def _sync_idle(self, source: int, idle: Sequence[int]) -> None:
        with torch.no_grad():
            for buffer in tuple(self._by_id.values()):
                buffer.sync_idle(idle)

    def _equalize(self, begun: tuple[int, ...]) -> None:
        with torch.inference_mode(False), torch.no_grad():
            for buffer in tuple(self._by_id.values()):
                buffer.equalize(begun)


def _warn_if_different(copies: Sequence[Tensor], buffer: ReplicatedBuffer) -> None:
    """Logs a warning if the replicas' copies of a buffer differ."""
    first = copies[0]
    if all(c.shape == first.shape and torch.equal(c.to(first.device), first) for c in copies):
        return
    buffer.num_checks = 0
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


def local_buffers(module: nn.Module) -> dict[str, tuple[list[int], list[Tensor]]]:
    """Returns the replicas' own values of a module's buffers, where they may differ.

    Returns:
        By name, the replicas of the last run, and all replicas' copies: the tensors themselves.
    """
    return {
        name: (list(ran), copies)
        for name, buffer in _mirrored_buffers(module).items()
        if (found := buffer.local_values()) is not None
        for ran, copies in (found,)
    }


def set_local_buffers(
    module: nn.Module, found: Mapping[str, tuple[Any, Sequence[Tensor]]]
) -> None:
    """Sets the values of ``local_buffers``, after the combined values were loaded.

    Values for another number of replicas, or of another shape or dtype, are ignored.
    """
    for name, buffer in _mirrored_buffers(module).items():
        if name in found:
            ran, copies = found[name]
            own = [(copy.shape, copy.dtype) for copy in buffer.copies]
            fits = own == [(copy.shape, copy.dtype) for copy in copies]
            if fits and all(r in range(len(own)) for r in ran):
                with torch.no_grad():
                    buffer.set_local_values(tuple(ran), copies)


def _mirrored_buffers(module: nn.Module) -> dict[str, ReplicatedBuffer]:
    return {
        name: buffer._mirrored
        for name, buffer in module.named_buffers()
        if isinstance(buffer, MirroredBuffer)
    }
