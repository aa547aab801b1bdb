"""Buffer: one mirrored buffer's copies, each replica's own in a step, combined when read outside.

[Note: Combined buffers]
A mirrored buffer holds the combined value; ``copies[r]`` is replica r's own. Reading in the
cross-replica context combines what the replicas changed since, and leaves their copies alone.
Writing there changes the combined value, which is given to the replicas before they next run.
A module in eval mode starts its run from the combined value, so that evaluation does not depend
on which replica an example falls to.

    aggregation   reading                                    writing x gives
    mean          mean over the replicas of the last step    x to all
    first         the first replica's                        x to all
    sum           the sum over all replicas, exactly         x to the first, zero to the rest
    none          an error                                   x to all

Where there are several workers, they combine theirs when a run ends, so that reading concerns one
alone: what is read is the value over all of them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from mirror.base.dynamo import disable_dynamo
from mirror.base.torch_private import make_subclass
from mirror.errors import StrategyError
from mirror.execution.current_replica import replica_of
from mirror.execution.replicas import Replicas
from mirror.replica.collectives.reduce_ops import summed, weighted_mean
from mirror.replica.params.mirrored_tensor import (
    MirroredTensor,
    raw_set_data,
    resolve,
    share_storage,
)
from mirror.replica.params.replicated_param import StorageAliases

_version_of = attrgetter("_version")
_LOOKS = 2
_NORMALISE = (
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d,
    nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d,
)  # fmt: skip

AGGREGATIONS = ("mean", "sum", "first", "none")

# What may touch a buffer of aggregation "none" outside run: saving, loading, and questions about
# its type. They see the first replica's copy.
_ALWAYS_READABLE = frozenset(
    {Tensor.detach, Tensor.copy_, Tensor.size, Tensor.dim, Tensor.is_floating_point,
     Tensor.is_complex, Tensor.numel, Tensor.__len__}
)  # fmt: skip


class CombinedBuffer(Tensor):
    """The combined value, as operations in the cross-replica context see it."""

    __torch_function__ = nn.Parameter.__torch_function__


class ReplicatedBuffer:
    """The copies of one mirrored buffer.

    Attributes:
        aggregation: how the copies combine, one of ``AGGREGATIONS``.
        combined: the combined value, on the first replica's device.
        handles: the tensors through which raw storage left in the cross-replica context.
        looks: how many of the next runs that write it are looked at, whether replicas differ.
    """

    __slots__ = (
        "__weakref__",
        "_aggregation",
        "_apart",
        "_combined_version",
        "_copy_versions",
        "_module",
        "_ran",
        "_stale",
        "combined",
        "copies",
        "devices",
        "handles",
        "looks",
        "name",
        "owner",
        "replicas",
    )  # fmt: skip

    def __init__(self, buffer: Tensor, name: str, module: nn.Module, replicas: Replicas) -> None:
        self.replicas = replicas
        self.name = name
        self.owner: Callable[[], Tensor | None] = weakref.ref(buffer)
        self._module = weakref.ref(module)
        averaged = buffer.is_floating_point() or buffer.is_complex()
        self._aggregation = "mean" if averaged else "first"
        self.devices = replicas.places.replica_at(buffer.device)
        self.combined: CombinedBuffer = make_subclass(CombinedBuffer, buffer.detach())
        self.copies = [buffer.detach().to(d, copy=True) for d in self.devices]
        self.handles = StorageAliases()
        self._ran = tuple(range(replicas.num_replicas))  # the replicas of the last run
        self._combined_version = self.combined._version
        self._copy_versions = self._versions()
        # The means of normalisation layers are documented; who chooses how needs not be told.
        self.looks = 0 if isinstance(module, _NORMALISE) else _LOOKS
        self._stale = False  # whether the copies may have changed since they were combined
        self._apart = False  # whether they may differ from the combined value

    @property
    def aggregation(self) -> str:
        return self._aggregation

    @aggregation.setter
    def aggregation(self, how: str) -> None:
        self.combine()
        self.looks = 0
        self._aggregation = how
        self._distribute()

    @disable_dynamo
    def read(self) -> Tensor:
        """Returns the value in the cross-replica context, brought up to date."""
        if self._aggregation == "none":
            return self.copies[0]
        self.combine()
        return self.combined

    def assign(self, replica_id: int, value: Tensor) -> None:
        """``module.buffer = value`` inside ``run``: this replica's copy from now on."""
        value = resolve(value)  # the buffer itself, as conversions assign
        others = (copy for r, copy in enumerate(self.copies) if r != replica_id)
        # Replicas that are given one tensor must not share it.
        shared = any(share_storage(value, copy) for copy in others)
        self.copies[replica_id] = value.clone() if shared else value
        self._stale = self._apart = True

    def set_data(self, replica_id: int, data: Tensor) -> None:
        """``module.buffer.data = data`` inside ``run``, which no version counter tells."""
        self.copies[replica_id].data = data
        self._stale = self._apart = True

    def is_written(self) -> bool:
        """Whether the copies may have been written since they were combined."""
        return self._stale or self._versions() != self._copy_versions

    def note_run(self, active: tuple[int, ...]) -> None:
        """Notes that replicas have run."""
        self._ran = active
        if self._aggregation != "none" and self.combined._version != self._combined_version:
            return  # another thread has changed it meanwhile: the replicas will be given that
        module = self._module()
        # In training batch_norm writes its statistics without a new version.
        if module is None or module.training or self._versions() != self._copy_versions:
            self._stale = self._apart = True
        if self._aggregation == "none":
            self._combined_version = self.copies[0]._version

    def wrote(self, active: tuple[int, ...]) -> None:
        """Notes that these replicas have written their copies."""
        self._ran = active
        self._stale = self._apart = True
        if len(active) < len(self.copies):  # in every such step: idle replicas follow the others
            with torch.no_grad():
                self.sync_idle([r for r in range(len(self.copies)) if r not in active])

    @torch.no_grad()
    def combine(self) -> bool:
        """Brings the combined value up to date; returns whether the replicas had changed it."""
        if not self._stale or self._aggregation == "none":
            return False
        self._stale = False
        self._set_combined(self._aggregate())
        self._copy_versions = self._versions()
        return True

    def must_be_given(self) -> bool:
        """Whether the replicas have, before they run, not what they must have."""
        # Asked of every buffer before every run: without a call.
        truth = self.copies[0] if self._aggregation == "none" else self.combined
        if self.handles or truth._version != self._combined_version:
            return True
        if not self._apart or self._aggregation == "none":
            return False
        module = self._module()
        return module is not None and not module.training  # evaluates

    def is_written_outside(self) -> bool:
        """Whether the value may have been written in the cross-replica context, and not given."""
        return bool(self.handles) or self._is_truth_written

    def give(self) -> None:
        """Gives the replicas the combined value; wants ``no_grad``."""
        self.combine()
        self._distribute()

    def sync_idle(self, idle: Sequence[int]) -> None:
        """Gives replicas that sat the step out the value of those that ran; wants ``no_grad``."""
        if self._aggregation in ("sum", "none") or not self._stale:
            return
        value = self._aggregate()
        for r in idle:
            self.copies[r] = value.to(self.devices[r], copy=True)

    def equalize(self, begun: tuple[int, ...]) -> None:
        """Gives all replicas what those combine to that had begun a run that failed.

        Of aggregations "sum" and "none" each replica's copy is its own, and stays so. Wants
        ``no_grad``; idempotent.
        """
        if self._aggregation in ("sum", "none") or self._is_truth_written:
            return  # or it will be given what another thread has written
        module = self._module()
        if not (self._apart or self.is_written() or module is None or module.training):
            return
        first = self.copies[begun[0]]
        # Some may have been given another shape already, and some not yet.
        self._ran = tuple(
            r
            for r in begun
            if self.copies[r].shape == first.shape and self.copies[r].dtype == first.dtype
        )
        self._stale = True
        self.give()
        self._stale = self._apart = self.replicas.workers.is_multi_process  # which share it next

    def local_values(self) -> tuple[tuple[int, ...], list[Tensor]] | None:
        """Returns who has run last, and the copies, if these may differ from what is read."""
        if not self._apart or self.must_be_given():
            return None
        return self._ran, [copy.detach() for copy in self.copies]

    def set_local_values(self, ran: tuple[int, ...], copies: Sequence[Tensor]) -> None:
        """Gives each replica a value of its own, which combine to what is read now."""
        self.give()
        for mine, copy in zip(self.copies, copies, strict=True):
            mine.data.copy_(copy)
        self._ran = ran
        self._apart = True
        self._stale = not self.replicas.workers.is_multi_process  # who combine it where runs end
        self._copy_versions = self._versions()

    def must_be_shared(self) -> bool:
        """Whether the replicas may have changed what the other workers are to know."""
        return self._stale and self._aggregation != "none"

    def own_part(self) -> tuple[Tensor, int]:
        """Returns what this worker's replicas combine to, and how many they are."""
        return self._aggregate().detach(), len(self._ran)

    def share(self, parts: Sequence[tuple[Tensor, float]]) -> None:
        """Takes for the combined value that of all workers' parts; wants ``no_grad``."""
        home = self.copies[0].device
        values = [part.to(home) for part, _ in parts]
        if self._aggregation == "sum":
            self._set_combined(summed(values, home))
        elif self._aggregation == "first":
            self._set_combined(values[0])
        else:
            self._set_combined(mean_of(values, [count for _, count in parts]))
        self._copy_versions = self._versions()
        self._stale = False

    @property
    def _is_truth_written(self) -> bool:
        is_written: bool = self.truth._version != self._combined_version
        return is_written

    @property
    def truth(self) -> Tensor:
        return self.copies[0] if self._aggregation == "none" else self.combined

    def _versions(self) -> tuple[int, ...]:
        return tuple(map(_version_of, self.copies))  # in C: after every run of an evaluation

    def _aggregate(self) -> Tensor:
        ran = self._ran
        if self._aggregation == "first":
            return self.copies[ran[0]]
        home = self.copies[0].device
        values = [copy.to(home) for copy in self.copies]
        if self._aggregation == "sum":
            return summed(values, home)
        return mean_of([values[r] for r in ran], [1] * len(ran))

    def _set_combined(self, value: Tensor) -> None:
        if value.shape != self.combined.shape or value.dtype != self.combined.dtype:
            fresh = value.detach().clone()
            owner = self.owner()
            if owner is not None:
                raw_set_data(owner, fresh)
            self.combined.data = fresh
        else:
            self.combined.data.copy_(value)

    def _distribute(self) -> None:
        value = self.truth.detach()
        for r, copy in enumerate(self.copies):
            is_zero = self._aggregation == "sum" and (r or self.replicas.workers.rank)
            mine = torch.zeros_like(value) if is_zero else value
            if copy is value:
                continue
            if copy.shape != mine.shape or copy.dtype != mine.dtype or copy.is_inference():
                self.copies[r] = mine.to(self.devices[r], copy=True)
            else:
                copy.data.copy_(mine)
        self.handles.drop_dead()
        self._settle()

    def _settle(self) -> None:
        self._combined_version = self.truth._version
        self._copy_versions = self._versions()
        self._stale = self._apart = False


def mean_of(values: Sequence[Tensor], counts: Sequence[float]) -> Tensor:
    """Returns the mean of buffers; of integers the first value."""
    first = values[0]
    # A mean of equal values is that value: 3 * (x / 3) may differ from x in the last bit.
    if all(torch.equal(value, first) for value in values[1:]):
        return first
    if not first.is_floating_point() and not first.is_complex():
        return first
    small = first.is_floating_point() and first.element_size() < 4
    wide = [value.float() for value in values] if small else list(values)  # half types overflow
    if len(set(counts)) == 1:
        return (summed(wide, first.device) / len(values)).to(first.dtype)
    return weighted_mean(wide, counts).to(first.dtype)


class MirroredBuffer(MirroredTensor):
    """A buffer that stands for the current replica's copy, or for the combined value."""

    _mirrored: ReplicatedBuffer

    def _replica_value(self) -> int | None:
        """Returns the current replica, if it is one of this buffer's; ``None`` outside."""
        replica = replica_of(self._mirrored.replicas)
        return None if replica is None else replica.replica_id

    def _resolve(self, func: object = None) -> Tensor:
        buffer = self._mirrored
        here = self._replica_value()
        if here is not None:
            return buffer.copies[here]
        if buffer.aggregation == "none":
            if func not in _ALWAYS_READABLE and getattr(func, "__name__", "") != "__get__":
                raise StrategyError(
                    f"buffer {buffer.name!r} has aggregation 'none': its replicas' values have no "
                    "common one to read outside strategy.run; read it inside run, or choose "
                    "another aggregation with mirror.set_aggregation"
                )
        return buffer.read()

    def _hand_out(self, handle: Tensor | None) -> None:
        if self._replica_value() is None:
            self._mirrored.handles.add(handle)

    def _set_data(self, data: Tensor) -> None:
        here = self._replica_value()
        if here is not None:
            self._mirrored.set_data(here, data)
        else:
            self._mirrored._set_combined(data)
            self._mirrored.handles.add(data)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            value = self._resolve(Tensor.detach).detach()
            memo[id(self)] = value.as_subclass(Tensor).clone()
        copied: Tensor = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._resolve(Tensor.detach).detach().as_subclass(Tensor).__reduce_ex__(protocol)
