"""Mirrored buffers: each replica has its own copy in a step; outside ``run`` they are combined.

A mirrored buffer holds the combined value; ``copies[r]`` is replica r's own. A read in the
cross-replica context combines the replicas' changes, and leaves their copies as they are. A write
there changes the combined value, which is distributed to the replicas before they next run. A
module in eval mode starts each run from the combined value, so that evaluation does not depend on
which replica gets an example.

    aggregation   a read returns                             a write of x sets
    mean          the mean over the last run's replicas (1)  x on all
    first         the first replica's value                  x on all
    sum           the sum over all replicas, exactly         x on the first, zero on the rest
    none          (raises StrategyError)                     x on all

(1) Of a moving mean over examples (statistics of InstanceNorm), weighted by the replicas' numbers
of examples. Every run then starts from the combined value, so that it is one device's.

Several workers combine their values when a run ends. So a read needs no communication, and returns
the value over all workers.

A view of the combined value that the program keeps, ``module.buffer.view(-1)``, sees later runs as
on one device: while one lives, the values are combined when a run ends. A tensor that ``detach``
returns, as those of a ``state_dict``, keeps the value that it had. A buffer in the memory of a
mirrored parameter, ``a.weight.detach()``, is there on every replica: [Note: Shared memory].
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from mirror.base.bitwise import have_equal_numbers
from mirror.base.dynamo import disable_dynamo
from mirror.comm.reduce_ops import reduce_tensors, weighted_mean
from mirror.errors import StrategyError
from mirror.execution.replicas import Replicas
from mirror.execution.run import replica_of
from mirror.replica.params.buffer_differences import (
    NORMS,
    averages_examples,
    num_checked_runs,
)
from mirror.replica.params.mirrored_tensor import (
    MirroredTensor,
    raw_set_data,
    resolve_copies,
    share_storage,
)
from mirror.replica.params.replicated_param import ReplicatedParam, StorageAliases
from mirror.replica.params.shared_memory import view_in

_version_of = attrgetter("_version")
AGGREGATIONS = ("mean", "sum", "first", "none")

# Allowed outside run for a buffer of aggregation "none": saving, loading, and questions about its
# type. They see the first replica's copy.
_ALWAYS_READABLE = frozenset(
    {Tensor.detach, Tensor.copy_, Tensor.size, Tensor.dim, Tensor.is_floating_point,
     Tensor.is_complex, Tensor.numel, Tensor.__len__}
)  # fmt: skip


class CombinedBuffer(Tensor):
    """The combined value, as operations in the cross-replica context see it."""

    __torch_function__ = nn.Parameter.__torch_function__


class ReplicatedBuffer:
    """The copies of one mirrored buffer.

    Args:
        twin: the mirrored parameter, or buffer, in whose memory it lies, if any.

    Attributes:
        aggregation: how the copies combine, one of ``AGGREGATIONS``.
        averages_examples: whether it is a moving mean over examples; see ``count_examples``.
        combined: the combined value, on the first replica's device.
        module: returns the module that holds the buffer, ``None`` once it is gone.
        handles: the tensors that expose raw storage in the cross-replica context.
        views: the tensors of which the views of the combined value are views.
        num_checks: how many of the next runs that write the buffer are checked for replicas that
            differ.
    """

    __slots__ = (
        "__weakref__",
        "_aggregation",
        "_combined_version",
        "_copy_versions",
        "_counts",
        "_may_differ",
        "_ran",
        "_stale",
        "_tied",
        "_variable",
        "averages_examples",
        "combined",
        "copies",
        "devices",
        "handles",
        "module",
        "name",
        "num_checks",
        "owner",
        "replicas",
        "views",
    )  # fmt: skip

    def __init__(
        self,
        buffer: Tensor,
        name: str,
        module: nn.Module,
        replicas: Replicas,
        twin: ReplicatedParam | ReplicatedBuffer | None = None,
    ) -> None:
        self.replicas = replicas
        self.name = name
        self.owner: Callable[[], Tensor | None] = weakref.ref(buffer)
        self.module: Callable[[], nn.Module | None] = weakref.ref(module)
        averaged = buffer.is_floating_point() or buffer.is_complex()
        self._aggregation = "mean" if averaged else "first"
        self.devices = replicas.mesh.peers_of(buffer.device)
        if _is_expanded(buffer):  # no operation writes into such memory
            buffer.data = buffer.data.clone(memory_format=torch.contiguous_format)
        self.combined = buffer.detach()
        self.combined.__class__ = CombinedBuffer
        if twin is None:
            self.copies = [buffer.detach().to(d, copy=True) for d in self.devices]
        else:
            self.copies = [view_in(twin, buffer, target) for target in twin.targets]
        self._variable = twin if isinstance(twin, ReplicatedParam) else None
        known: list[ReplicatedBuffer] = twin._tied if isinstance(twin, ReplicatedBuffer) else []
        self._tied: list[ReplicatedBuffer] = known
        known.append(self)
        self.handles, self.views = StorageAliases(), StorageAliases()
        self._ran = tuple(range(replicas.num_replicas))  # the replicas of the last run
        self.averages_examples = averages_examples(module)
        self._counts: Sequence[float] | None = None  # of all replicas, if they weigh the mean
        self._combined_version = self.combined._version
        self._copy_versions = self._versions()
        # The setter of aggregation also ends the checks.
        self.num_checks = num_checked_runs(module, name)
        self._stale = False  # whether the copies may have changed since they were combined
        self._may_differ = False  # whether they may differ from the combined value

    @property
    def home(self) -> Tensor:
        return self.combined

    @property
    def shown(self) -> Tensor:
        return self.combined

    @property
    def targets(self) -> Sequence[Tensor]:
        return self.copies

    @property
    def aggregation(self) -> str:
        return self._aggregation

    @aggregation.setter
    def aggregation(self, how: str) -> None:
        self.combine()
        self.num_checks = 0
        self._aggregation = how
        self._distribute()

    @disable_dynamo
    def read(self) -> Tensor:
        """Returns the current value in the cross-replica context."""
        if self._aggregation == "none":
            return self.copies[0]
        self.combine()
        return self.combined

    def assign(self, replica_id: int, value: Tensor) -> None:
        """Replaces a replica's copy: ``module.buffer = value`` inside ``run``."""
        value = resolve_copies(value)  # conversions assign the mirrored buffer itself
        if value is not self.copies[replica_id]:  # which ``self.count += 1`` assigns
            self.leave_shared()
        others = (copy for r, copy in enumerate(self.copies) if r != replica_id)
        # Replicas that assign one tensor must not share its memory.
        shared = any(share_storage(value, copy) for copy in others)
        self.copies[replica_id] = value.clone() if shared else value
        self._stale = self._may_differ = True

    def set_data(self, replica_id: int, data: Tensor) -> None:
        """Sets a replica's data: ``module.buffer.data = data``, which keeps the version."""
        self.leave_shared()
        self.copies[replica_id].data = data
        self._stale = self._may_differ = True

    def lend_copy(self, replica_id: int) -> tuple[Any, ...]:
        """Gives a replica a clone of its copy, for a time; returns the state for ``give_back``."""
        own = self.copies[replica_id]
        self.copies[replica_id] = own.clone()
        return own, self._stale, self._may_differ

    def give_back(self, replica_id: int, state: tuple[Any, ...]) -> None:
        """Restores a replica's copy, and what is known of it."""
        self.copies[replica_id], self._stale, self._may_differ = state

    def replace(self, data: Tensor) -> None:
        """Sets the data of all replicas: ``module.buffer.data = data`` outside ``run``."""
        if self._is_in_parameter() or self._is_tied():
            self.copies = [copy.detach().clone() for copy in self.copies]
            self.leave_shared()
        self._stale = False  # what replicas have written is replaced
        self._set_combined(data)
        self.handles.add(data)

    def _is_in_parameter(self) -> bool:
        """Whether the buffer still lies in the memory of a mirrored parameter."""
        variable = self._variable
        if variable is None:
            return False
        if variable.owner() is not None and share_storage(self.copies[0], variable.targets[0]):
            if share_storage(self.combined, variable.home):
                return True
        self.leave_shared()
        return False

    def _is_tied(self) -> bool:
        """Whether the buffer still lies in the memory of other buffers."""
        others = [other for other in self._tied if other is not self]
        if not others:
            return False
        if any(share_storage(self.copies[0], other.copies[0]) for other in others):
            return True
        self.leave_shared()
        return False

    def leave_shared(self) -> None:
        """Gives the combined value memory of its own, once the buffer has other memory."""
        if self._variable is not None or len(self._tied) > 1:
            self._variable = None
            self._tied.remove(self)
            self._tied = [self]
            self._move_combined(self.combined.detach().clone())

    def is_written(self) -> bool:
        """Whether the copies may have been written since they were combined."""
        return self._stale or self.has_new_versions()

    def has_new_versions(self) -> bool:
        """Whether an operation in place has written a copy since they were combined."""
        return self._versions() != self._copy_versions

    def record_run(self, active: tuple[int, ...]) -> None:
        """Records that a run of these replicas has ended."""
        self._ran = active
        if self._aggregation != "none" and self.combined._version != self._combined_version:
            return  # another thread has written the combined value, which will be distributed
        module = self.module()
        # In training batch_norm writes its statistics without a new version.
        is_unversioned = module is None or module.training
        if is_unversioned and self.combined.layout is not torch.strided:
            is_unversioned = False
        if is_unversioned or self._versions() != self._copy_versions:
            self._stale = self._may_differ = True
        if self._aggregation == "none":
            self._combined_version = self.copies[0]._version
        if self.views or self.handles:  # they must see what a run has written
            self.views.drop_dead()
            # Workers combine after this, in any case.
            combines = not self.replicas.workers.is_multi_process
            if combines and (self.views or self.handles.are_live()):
                with torch.inference_mode(False):
                    self.combine()

    def count_examples(
        self, active: tuple[int, ...], counts: Mapping[int, float] | Sequence[float] | None
    ) -> None:
        """Sets the weights of a moving mean over examples, before the run is recorded.

        Args:
            active: the replicas of the run.
            counts: the numbers of examples, by replica; equal if ``None``.
        """
        is_used = counts is not None and any(counts[r] for r in active)
        self._counts = [counts[r] for r in active] if is_used and counts is not None else None

    def view(self, make: Callable[[Tensor], Any]) -> Any:
        """Returns a view of the combined value, or a list of them.

        Args:
            make: makes it of a tensor, which lives as long as any view of it.
        """
        base = self.combined.detach()
        self.views.add(base)
        return make(base)

    @torch.no_grad()
    def combine(self) -> bool:
        """Brings the combined value up to date; returns whether the replicas had changed it.

        Raises:
            StrategyError: the combined value was written since, through a tensor of before.
        """
        if not self._stale or self._aggregation == "none":
            return False
        if self._is_in_parameter():  # which is kept equal
            self._stale = False
            return False
        self._stale = False
        is_lost = self._is_truth_written
        if is_lost and not self.has_new_versions() and not isinstance(self.module(), NORMS):
            return False  # the run has written nothing
        is_tied = len(self._tied) > 1 and self._is_tied()
        self._set_combined(self._aggregate())
        self._copy_versions = self._versions()
        for other in tuple(self._tied) if is_tied else ():
            other.combine()  # the same memory: later it would undo what is written from now on
        if is_lost:
            raise StrategyError(
                f"buffer {self.name!r} was written by a run, and then through a tensor that "
                "detach(), or a state_dict, had returned before that run; that tensor had the "
                "value of before, so the second write is dropped; read the buffer again after a "
                "run, and write that"
            )
        return True

    def must_distribute(self) -> bool:
        """Whether the replicas' copies must be updated before they run."""
        return bool(find_changed((self,)))

    def is_written_outside(self) -> bool:
        """Whether the cross-replica context may have written a value that is not distributed."""
        return bool(self.handles) or self._is_truth_written

    def distribute(self) -> None:
        """Copies the combined value to the replicas. The caller sets ``no_grad``."""
        self.combine()
        self._distribute()

    def sync_idle(self, idle: Sequence[int]) -> None:
        """Copies the value of the active replicas to idle ones. The caller sets ``no_grad``."""
        if self._aggregation in ("sum", "none") or not self._stale:
            return
        value = self._aggregate()
        for r in idle:
            self.copies[r] = value.to(self.devices[r], copy=True)

    def equalize(self, begun: tuple[int, ...]) -> None:
        """Makes all replicas equal after a failed run, from the replicas that had begun it.

        With aggregation "sum" or "none" the copies stay different. The caller sets ``no_grad``;
        idempotent.
        """
        if self._aggregation in ("sum", "none") or self._is_truth_written:
            return  # in the last case distribute() copies what another thread has written
        module = self.module()
        if not (self._may_differ or self.is_written() or module is None or module.training):
            return
        first = self.copies[begun[0]]
        # The failed run may have changed the shape or dtype on some replicas only.
        self._ran = tuple(
            r
            for r in begun
            if self.copies[r].shape == first.shape and self.copies[r].dtype == first.dtype
        )
        self._counts = None
        self._stale = True
        self.distribute()
        # Several workers combine it next.
        self._stale = self._may_differ = self.replicas.workers.is_multi_process

    def local_values(self) -> tuple[tuple[int, ...], list[Tensor]] | None:
        """Returns the replicas of the last run, and all copies.

        ``None`` if the copies are equal to the combined value.
        """
        if not self._may_differ or self.must_distribute():
            return None
        return self._ran, [copy.detach() for copy in self.copies]

    def set_local_values(self, ran: tuple[int, ...], copies: Sequence[Tensor]) -> None:
        """Sets each replica's own value; they combine to the current combined value."""
        self.distribute()
        for mine, copy in zip(self.copies, copies, strict=True):
            mine.data.copy_(copy)
        self._ran, self._counts = ran, None
        self._may_differ = True
        self._stale = not self.replicas.workers.is_multi_process  # workers combine when runs end
        self._copy_versions = self._versions()

    def must_combine_workers(self) -> bool:
        """Whether the last run may have changed the value, so that workers must combine it."""
        return self._stale and self._aggregation != "none"

    def local_aggregate(self) -> tuple[Tensor, float]:
        """Returns the combined value of this worker's replicas, and its weight: their number."""
        weight = len(self._ran) if self._counts is None else sum(self._counts)
        return self._aggregate().detach(), weight

    def combine_workers(self, aggregates: Sequence[tuple[Tensor, float]]) -> None:
        """Sets the combined value from each worker's ``local_aggregate``.

        The caller sets ``no_grad``.
        """
        device = self.copies[0].device
        values = [value.to(device) for value, _ in aggregates]
        if self._aggregation == "sum":
            self._set_combined(reduce_tensors(values, device))
        elif self._aggregation == "first":
            self._set_combined(values[0])
        else:
            self._set_combined(mean_of(values, [count for _, count in aggregates]))
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
        return tuple(map(_version_of, self.copies))  # map runs in C; called after every run

    def _aggregate(self) -> Tensor:
        ran = self._ran
        if self._aggregation == "first":
            return self.copies[ran[0]]
        device = self.copies[0].device
        values = [copy.to(device) for copy in self.copies]
        if self._aggregation == "sum":
            return reduce_tensors(values, device)
        return mean_of([values[r] for r in ran], self._counts or [1] * len(ran))

    def _set_combined(self, value: Tensor) -> None:
        known = self.combined
        is_same_kind = value.shape == known.shape and value.dtype == known.dtype
        if not is_same_kind or known.layout is not torch.strided:
            self._move_combined(value.detach().clone())
        else:
            self.combined.data.copy_(value)

    def _move_combined(self, fresh: Tensor) -> None:
        owner = self.owner()
        if owner is not None:
            raw_set_data(owner, fresh)
        self.combined.data = fresh

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
        self._mark_synced()

    def _mark_synced(self) -> None:
        self._combined_version = self.truth._version
        self._copy_versions = self._versions()
        self._stale = self._may_differ = False


def _is_expanded(buffer: Tensor) -> bool:
    """Returns whether elements of a tensor are one in memory, as ``Tensor.expand`` makes them."""
    if buffer.layout is not torch.strided:
        return False
    sizes = zip(buffer.shape, buffer.stride(), strict=True)
    return any(stride == 0 and size > 1 for size, stride in sizes)


def mean_of(values: Sequence[Tensor], counts: Sequence[float]) -> Tensor:
    """Returns the mean of buffers; of integer buffers the first."""
    first = values[0]
    # The mean of equal values must be that value; 3 * (x / 3) may differ from x in the last bit.
    if all(have_equal_numbers(value, first) for value in values[1:]):
        return first
    if not first.is_floating_point() and not first.is_complex():
        return first
    small = first.is_floating_point() and first.element_size() < 4
    wide = [value.float() for value in values] if small else list(values)  # float16 may overflow
    if len(set(counts)) == 1:
        return (reduce_tensors(wide, first.device) / len(values)).to(first.dtype)
    return weighted_mean(wide, counts).to(first.dtype)


def find_changed(buffers: Sequence[ReplicatedBuffer]) -> list[ReplicatedBuffer]:
    """Returns the buffers of which the replicas' copies must be updated before they run.

    It runs before every run, so it repeats ``is_written_outside`` without a call for each buffer.
    """
    found = []
    for buffer in buffers:
        aggregation = buffer._aggregation
        truth = buffer.copies[0] if aggregation == "none" else buffer.combined
        if not buffer.handles and truth._version == buffer._combined_version:
            if not buffer._may_differ or aggregation == "none":
                continue
            if buffer.averages_examples:
                if aggregation != "mean":
                    continue
            else:
                module = buffer.module()
                if module is None or module.training:  # else it evaluates
                    continue
        found.append(buffer)
    return found


def record_writes(buffers: Sequence[ReplicatedBuffer], active: tuple[int, ...]) -> None:
    """Records that these replicas have written their copies; idle replicas follow them."""
    for buffer in buffers:
        buffer._ran = active
        buffer._stale = buffer._may_differ = True
    if buffers and len(active) < len(buffers[0].copies):
        idle = [r for r in range(len(buffers[0].copies)) if r not in active]
        with torch.no_grad():
            for buffer in buffers:
                buffer.sync_idle(idle)


class MirroredBuffer(MirroredTensor):
    """A buffer that resolves to the current replica's copy, or to the combined value."""

    _mirrored: ReplicatedBuffer

    def _replica_id(self) -> int | None:
        """Returns the index of the current replica; ``None`` outside this buffer's replicas."""
        replica = replica_of(self._mirrored.replicas)
        return None if replica is None else replica.replica_id

    def _resolve(self, func: object = None) -> Tensor:
        buffer = self._mirrored
        replica_id = self._replica_id()
        if replica_id is not None:
            return buffer.copies[replica_id]
        if buffer.aggregation == "none":
            if func not in _ALWAYS_READABLE and getattr(func, "__name__", "") != "__get__":
                raise StrategyError(
                    f"buffer {buffer.name!r} has aggregation 'none': its replicas' values have no "
                    "common one to read outside strategy.run; read it inside run, or choose "
                    "another aggregation with mirror.set_aggregation"
                )
        return buffer.read()

    def _expose(self, handle: Tensor | None) -> None:
        if self._replica_id() is None:
            self._mirrored.handles.add(handle)

    def _set_data(self, data: Tensor) -> None:
        replica_id = self._replica_id()
        if replica_id is not None:
            self._mirrored.set_data(replica_id, data)
        else:
            self._mirrored.replace(data)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = super().__torch_function__(func, types, args, kwargs)
        first = result[0] if type(result) in (tuple, list) and result else result
        base = first._base if isinstance(first, Tensor) else None
        if isinstance(base, CombinedBuffer) and args and isinstance(args[0], MirroredBuffer):
            buffer = args[0]._mirrored
            if base is buffer.combined:
                return buffer.view(lambda base: func(base, *args[1:], **(kwargs or {})))
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            value = self._resolve(Tensor.detach).detach()
            memo[id(self)] = value.as_subclass(Tensor).clone()
        copied: Tensor = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._resolve(Tensor.detach).detach().as_subclass(Tensor).__reduce_ex__(protocol)
