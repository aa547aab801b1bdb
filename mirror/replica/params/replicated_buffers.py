"""All mirrored buffers of a strategy, which are mirrored in place and distributed before runs.

``local_buffers`` and ``set_local_buffers`` save and restore the replicas' own values for
checkpoints. Otherwise a resumed run would start with the combined value on every replica, and
would differ by rounding from a run that was never interrupted.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from mirror.errors import StrategyError
from mirror.execution.lifecycle import LifecycleHooks, WhilePending
from mirror.execution.replicas import Replicas
from mirror.execution.run import Run
from mirror.replica.params.buffer_differences import (
    BATCH_NORMS,
    are_different,
    log_statistics,
    warn_of_buffer,
)
from mirror.replica.params.mirrored_buffer import (
    MirroredBuffer,
    ReplicatedBuffer,
    find_changed,
)
from mirror.replica.params.replicated_param import ReplicatedParam
from mirror.replica.params.replicated_params import MirroredTensors, put_in_order
from mirror.replica.params.shared_memory import StorageIndex


class Buffers:
    """The mirrored buffers of a strategy."""

    def __init__(
        self,
        replicas: Replicas,
        registry: MirroredTensors,
        memory: StorageIndex[ReplicatedParam],
    ) -> None:
        self._replicas, self._registry, self._memory = replicas, registry, memory
        self._own_memory: StorageIndex[ReplicatedBuffer] = StorageIndex()
        self._by_id: dict[int, ReplicatedBuffer] = {}
        self._means: dict[int, ReplicatedBuffer] = {}  # over examples
        self._counts: Mapping[int, float] | Sequence[float] | None = None

    def __iter__(self) -> Iterator[ReplicatedBuffer]:
        return iter(tuple(self._by_id.values()))  # a garbage collection may remove entries

    def part(self) -> LifecycleHooks:
        """Returns the hooks that distribute combined values, and record the replicas' changes."""
        return LifecycleHooks(
            name="buffers",
            prepare=WhilePending(self._by_id, self.distribute_changed),
            finish=WhilePending(self._means, self._count_examples),
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
            StrategyError: the buffer is a tensor subclass, requires a gradient, or shares memory
                with a mirrored parameter in part.
        """
        if type(buffer) not in (Tensor, nn.Parameter):
            raise StrategyError(
                f"buffer {name!r} is a {type(buffer).__name__}, a tensor subclass with operations "
                "of its own; mirror takes plain tensors"
            )
        if buffer.requires_grad:
            raise StrategyError(
                f"buffer {name!r} requires a gradient, and gradients are reduced for parameters; "
                "make it an nn.Parameter, which an optimizer need not get, or detach it"
            )
        home = self._replicas.mesh.home_of(buffer.device, name)
        if buffer.device != home:
            buffer.data = buffer.data.to(home)
        twin: ReplicatedParam | ReplicatedBuffer | None = self._memory.find(buffer, name)
        if twin is None:
            with suppress(StrategyError):  # parts of one constant, say
                twin = self._own_memory.find(buffer, name)
        record = ReplicatedBuffer(buffer, name, module, self._replicas, twin)
        self._by_id[id(buffer)] = record
        if record.averages_examples:
            self._means[id(buffer)] = record
        self._own_memory.enter(record)
        self._registry.register(buffer, self._make_forget())
        buffer._mirrored = record  # type: ignore[attr-defined]
        buffer.__class__ = MirroredBuffer
        return record

    def _make_forget(self) -> Callable[[int], None]:
        reference = weakref.ref(self)

        def forget(key: int) -> None:
            buffers = reference()
            record = None if buffers is None else buffers._by_id.pop(key, None)
            if buffers is not None and record is not None:
                buffers._means.pop(key, None)
                buffers._own_memory.remove(record)
                record.leave_shared()

        return forget

    def distribute_changed(self) -> None:
        """Distributes values that were written outside ``run``, or that an evaluation needs."""
        # A copy of the dict: a garbage collection may remove entries.
        changed = find_changed(tuple(self._by_id.values()))
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

    def _count_examples(self, run: Run) -> None:
        """Records the replicas' numbers of examples, for moving means over examples."""
        self._counts = run.weights() if run.counts is None else run.counts

    def _on_run_end(self, active: tuple[int, ...]) -> None:
        counts, self._counts = self._counts, None  # of this run
        for buffer in tuple(self._by_id.values()):
            if buffer.num_checks and len(active) > 1 and buffer.is_written():
                self._check(buffer, active)
            if buffer.averages_examples:
                buffer.count_examples(active, counts)
            buffer.record_run(active)

    def _check(self, buffer: ReplicatedBuffer, active: tuple[int, ...]) -> None:
        """Logs a warning if the replicas of a run have left a buffer different."""
        module, is_different = buffer.module(), are_different([buffer.copies[r] for r in active])
        if isinstance(module, BATCH_NORMS):
            if not buffer.has_new_versions():
                return  # the layer has not been called yet
            buffer.num_checks -= 1
            mean = module._buffers.get("running_mean")
            if is_different or not isinstance(mean, MirroredBuffer):
                return  # the run has failed on the way, or nothing is tracked
            if are_different([mean._mirrored.copies[r] for r in active]):
                self._report_statistics(module, buffer.name.rpartition(".")[0])
            return
        buffer.num_checks -= 1
        if is_different:
            buffer.num_checks = 0
            warn_of_buffer(buffer.name, buffer.aggregation == "mean")

    def _report_statistics(self, norm: nn.Module, name: str) -> None:
        """Logs one message for all layers that normalise each part of the batch by itself."""
        norms = [buffer for buffer in self if isinstance(buffer.module(), BATCH_NORMS)]
        for buffer in norms:
            buffer.num_checks = 0
        num_more = len({id(buffer.module()) for buffer in norms}) - 1
        log_statistics(norm, name, num_more)

    def _sync_idle(self, source: int, idle: Sequence[int]) -> None:
        with torch.no_grad():
            for buffer in tuple(self._by_id.values()):
                buffer.sync_idle(idle)

    def _equalize(self, begun: tuple[int, ...]) -> None:
        with torch.inference_mode(False), torch.no_grad():
            for buffer in tuple(self._by_id.values()):
                buffer.equalize(begun)


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
