"""CentralParam: a mirrored parameter on a parameter device, and its gradient there.

``CentralStorageStrategy`` keeps parameters on a parameter device. There every parameter has two
more tensors on one storage, which holds the authoritative values:

    home         an ordinary parameter on the parameter device. Optimizers step it once, and their
                 state belongs to it. ``p`` shares its storage.
    shown        a copy on the storage of ``home``: ``p`` resolves to it in the cross-replica
                 context.
    copies[r],   on the replicas' devices, see [Note: Three tensors, one storage]. They never share
    targets[r]   the storage of ``home``, even on the same device.

A change of ``home`` is broadcast to all copies before they next run, as the first replica's
changes are without a parameter device: [Note: Coherence]. A change that all replicas have made in
a run is copied from the first of them to ``home``: when the run ends, when it merges to call a
function in the cross-replica context, and before a step. It is detected by the copy's version, or
by raw storage that was exposed inside ``run``. After a step the values of ``home`` are copied to
all replicas.

The reduced gradient is every replica's ``targets[r].grad``. ``home`` has a gradient while a step
needs it, and while the cross-replica context has read it: ``gradients/exposed_grads.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from mirror.execution.run import current
from mirror.replica.params.mirrored_tensor import (
    DATA,
    REQUIRES_GRAD,
    derived_class,
    parameter_like,
    raw_set_data,
    same_kind,
    share_storage,
    value_on,
)
from mirror.replica.params.replicated_param import (
    ReplicaParameter,
    ReplicatedParam,
    StorageAliases,
)
from mirror.replica.params.replicated_params import ReplicatedParams
from mirror.replica.params.shared_memory import lie_alike, view_in


class CentralParamCopy(ReplicaParameter):
    """One replica's copy; it records when raw storage is exposed inside ``run``."""

    variable: CentralParam

    @property
    def data(self) -> Tensor:
        """The copy's data; a write through it makes ``home`` stale."""
        data: Tensor = DATA.__get__(self)
        self.variable.exposed_in_run.add(data)
        return data

    @data.setter
    def data(self, value: Tensor) -> None:
        self.variable.set_data(value)

    def detach(self) -> Tensor:
        """Returns a detached tensor; its NumPy array may be written without a new version."""
        self.variable.exposed_in_run.add(None)
        return super().detach()


class ShownParameter(ReplicaParameter):
    """The tensor that the parameter resolves to in the cross-replica context."""

    def make_plain(self) -> nn.Parameter:
        """Returns an ordinary parameter on its storage, of its class before mirroring."""
        home = self.variable.home
        plain: nn.Parameter = parameter_like(home, type(home), self, self.requires_grad)
        return plain


class CentralParam(ReplicatedParam):
    """A mirrored parameter on a parameter device.

    Attributes:
        known: the versions of the copies when they were last equal to ``home``.
        exposed_in_run: the tensors that expose a replica's raw storage inside ``run``.
    """

    __slots__ = ("exposed_in_run", "known")
    copy_kind = CentralParamCopy

    def _first_values(self, value: Tensor) -> list[Tensor]:
        twin = self.memory.find(value, self.name)
        if twin is None:
            return [value_on(value, device) for device in self.replicas.devices]
        return [view_in(twin, value, target) for target in twin.targets]

    def _find_home(self, parameter: nn.Parameter) -> None:
        self.exposed_in_run = StorageAliases()
        kind, requires_grad = type(parameter), parameter.requires_grad
        self.home = parameter_like(parameter, kind, parameter.detach(), requires_grad)
        self.home.variable = self  # type: ignore[attr-defined]
        shown = derived_class(ShownParameter, kind)
        self.shown = parameter_like(self.home, shown, self.home, requires_grad)
        self.shown.variable, self.shown.replica_id = self, 0
        self.leaves = (self.shown, *self.copies)
        self.mark_equal()
        if requires_grad:
            self.gradients.receive(self, self.shown)

    # Values

    def expose_storage(self, handle: Tensor | None) -> None:
        """Records that raw storage of ``home`` or of a replica is exposed."""
        handles = self.handles if self.forward_param() is None else self.exposed_in_run
        handles.add(handle)

    def mark_equal(self) -> None:
        """Marks ``home`` and all copies as equal."""
        self.version = self.shown._version
        self.known = [copy._version for copy in self.copies]

    def has_changed_in_run(self, replica_id: int) -> bool:
        """Whether a replica may have changed its copy since it was equal to ``home``."""
        changed = self.copies[replica_id]._version != self.known[replica_id]
        return changed or bool(self.exposed_in_run)

    @torch.no_grad()
    def take(self, source: int) -> None:
        """Copies a replica's values and flag to ``home``."""
        value, target = self.targets[source].data, self.home
        if same_kind(target, value) and target.stride() == value.stride():
            target.data.copy_(value)
        else:
            self._set_home_data(value_on(value, self.replicas.parameter_device))
        required = self.copies[source].requires_grad
        if self.shown.requires_grad != required:
            self._require_grad_at_home(required)
        self.mark_equal()
        self.exposed_in_run.drop_dead()

    def broadcast(self, source: int = 0, others: Iterable[int] | None = None) -> None:
        """Copies one replica's values to others; without ``others`` those of ``home`` to all."""
        if others is not None:
            others = tuple(others)
            if 0 in others and self.has_changed_in_run(source):
                self.exposed_in_run.add(None)  # replica 0 has the new value, home does not
            super().broadcast(source, others)
            return
        value = self.home.data
        for r, target in enumerate(self.targets):
            if same_kind(target, value):
                target.data.copy_(value)
            else:
                self._set_replica_data(r, value)
        self.mark_equal()
        self.handles.drop_dead()

    def set_data(self, data: Tensor) -> None:
        """Sets the data of the current replica; of ``home`` and all replicas outside ``run``."""
        replica, replica_id = current.replica, self.forward_param()
        if replica_id is not None and replica is not None:
            self._set_replica_data(replica_id, data)
            self.exposed_in_run.add(data)
            replica.run.assigned[self] = True
            return
        data = data.to(self.replicas.parameter_device)
        twin = self.memory.find(data, self.name, but=self)
        self._set_home_data(data)
        for r in range(len(self.copies)):
            own = data if twin is None else view_in(twin, data, twin.targets[r])
            self._set_replica_data(r, own)
        self.mark_equal()
        self.handles.add(data)

    def _set_replica_data(self, replica_id: int, data: Tensor) -> None:
        value = data.to(device := self.replicas.devices[replica_id])
        others = (target for r, target in enumerate(self.targets) if r != replica_id)
        if any(share_storage(value, target) for target in (self.home, *others)):
            value = value_on(data, device)
        self.memory.num_moves += 1
        self.targets[replica_id].data = value
        copy = self.copies[replica_id]
        DATA.__set__(copy, value)
        copy.flat_at = 0

    def follow_leaf(self, leaf: ReplicaParameter) -> bool:
        """Has ``home``, or a target, follow a leaf that C++ has given other memory."""
        if leaf is not self.shown:
            return super().follow_leaf(leaf)
        if lie_alike(leaf, self.home):
            return False
        self._set_home_data(DATA.__get__(leaf))
        return True

    def _set_home_data(self, value: Tensor) -> None:
        self.home.data = value
        DATA.__set__(self.shown, value)
        self.shown.flat_at = 0
        owner = self.owner()
        if owner is not None:
            raw_set_data(owner, value)
        self.memory.enter(self)

    # requires_grad

    def set_requires_grad(self, requires_grad: bool) -> None:
        """Sets it for the current replica; for ``home`` and all replicas outside ``run``."""
        if self.forward_param() is None:
            self._require_grad_at_home(requires_grad)
        else:
            self.exposed_in_run.add(None)  # the end of the run copies it to home
        super().set_requires_grad(requires_grad)

    def _require_grad_at_home(self, requires_grad: bool) -> None:
        REQUIRES_GRAD.__set__(self.shown, requires_grad)
        self.home.requires_grad_(requires_grad)
        if requires_grad:
            self.gradients.receive(self, self.shown)


class CentralParams(ReplicatedParams):
    """The mirrored parameters of a strategy with a parameter device."""

    kind = CentralParam

    def __iter__(self) -> Iterator[CentralParam]:
        return cast("Iterator[CentralParam]", super().__iter__())

    def mark_stale(self, variables: Sequence[ReplicatedParam], others: Sequence[int]) -> None:
        """Copies the first replica's values to ``home``; ``sync_changed`` does, to the others."""
        for variable in cast("Sequence[CentralParam]", variables):
            variable.take(0)
        super().mark_stale(variables, others)

    def _mark_synced(self) -> None:
        if self._exposed:
            self._warn_of_writes()
        for variable in self:
            if variable.exposed_in_run or variable.copies[0]._version != variable.known[0]:
                variable.take(0)

    def _broadcast_first(self) -> None:
        # Keeps the changes that the first replica has made before it failed, as on one device.
        self._mark_synced()
        super()._broadcast_first()
