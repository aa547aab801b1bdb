"""CentralParam: a mirrored parameter that lives at home, and of which replicas have copies.

[Note: Home]
Where parameters are kept on a device of their own, as with ``CentralStorageStrategy``, there is
one tensor more per parameter, and it is the truth:

    home         an ordinary parameter on the parameter device: what optimizers step, once, and
                 what their state belongs to. ``p`` shares its storage.
    shown        a copy on home's storage: what ``p`` stands for in the cross-replica context.
    copies[r],   as ever, see [Note: Three tensors, one storage], on the replicas' devices. None
    targets[r]   of them is home's storage, whatever the devices are.

What changed at home is carried to all copies before they next run, as the first replica's changes
are where that is home: [Note: Coherence]. What replicas have changed in a run, all alike, home
takes from the first of them when the run ends, when it merges to call something in the
cross-replica context, and before a step: seen by the version of the copy, or noted when raw
storage left inside ``run``. After a step home's values go to all copies.

The reduced gradient is every replica's ``targets[r].grad``, as ever. Home has one while a step
needs it, and while the cross-replica context has seen it: ``gradients/home/access.py``.

CentralParams: all mirrored parameters of a strategy that keeps them at home.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from mirror.execution.current_replica import current
from mirror.replica.params.mirrored_tensor import DATA, REQUIRES_GRAD, raw_set_data, share_storage
from mirror.replica.params.replicated_param import (
    ReplicaParameter,
    ReplicatedParam,
    StorageAliases,
)
from mirror.replica.params.replicated_params import ReplicatedParams
from mirror.replica.params.subclasses import derived_class, parameter_like, same_kind, value_on

if TYPE_CHECKING:
    from collections.abc import Iterable


class CentralParamCopy(ReplicaParameter):
    """One replica's copy, which tells of raw storage that leaves inside ``run``."""

    variable: CentralParam

    @property
    def data(self) -> Tensor:
        """The copy's data; through it home may be left behind."""
        data: Tensor = DATA.__get__(self)
        self.variable.handed_in_run.add(data)
        return data

    @data.setter
    def data(self, value: Tensor) -> None:
        self.variable.set_data(value)

    def detach(self) -> Tensor:
        """As ever; its numpy array may be written without a new version."""
        self.variable.handed_in_run.add(None)
        return super().detach()


class ShownParameter(ReplicaParameter):
    """What stands for the parameter in the cross-replica context: of no replica."""

    def plain(self) -> nn.Parameter:
        """Returns what it would be if it were not mirrored, on its storage."""
        home = self.variable.home
        plain: nn.Parameter = parameter_like(home, type(home), self, self.requires_grad)
        return plain


class CentralParam(ReplicatedParam):
    """A mirrored parameter with a home of its own. See [Note: Home].

    Attributes:
        known: the versions of the copies when they were last known to be as home is.
        handed_in_run: the tensors through which a replica's raw storage left inside ``run``.
    """

    __slots__ = ("handed_in_run", "known")
    copy_kind = CentralParamCopy

    def _first_values(self, value: Tensor) -> list[Tensor]:
        return [value_on(value, device) for device in self.replicas.devices]

    def _find_home(self, parameter: nn.Parameter) -> None:
        self.handed_in_run = StorageAliases()
        kind, requires_grad = type(parameter), parameter.requires_grad
        self.home = parameter_like(parameter, kind, parameter.detach(), requires_grad)
        self.home.variable = self  # type: ignore[attr-defined]
        shown = derived_class(ShownParameter, kind)
        self.shown = parameter_like(self.home, shown, self.home, requires_grad)
        self.shown.variable, self.shown.replica_id = self, 0
        self.leaves = (self.shown, *self.copies)
        self.note_known()
        if requires_grad:
            self.gradients.receive(self, self.shown)

    # Values

    def expose_storage(self, handle: Tensor | None) -> None:
        """Notes that raw storage left, of home or of a replica."""
        handles = self.handles if self.forward_param() is None else self.handed_in_run
        handles.add(handle)

    def note_known(self) -> None:
        """Takes home and all copies as equal."""
        self.version = self.shown._version
        self.known = [copy._version for copy in self.copies]

    def has_changed_in_run(self, replica_id: int) -> bool:
        """Whether a replica's copy may differ from home by what the replica did."""
        changed = self.copies[replica_id]._version != self.known[replica_id]
        return changed or bool(self.handed_in_run)

    @torch.no_grad()
    def take(self, source: int) -> None:
        """Gives home what a replica has left in its copy."""
        value, target = self.targets[source].data, self.home
        if same_kind(target, value) and target.stride() == value.stride():
            target.data.copy_(value)
        else:
            self._give_home(value_on(value, self.replicas.parameter_device))
        required = self.copies[source].requires_grad
        if self.shown.requires_grad != required:
            self._require_grad_at_home(required)
        self.note_known()
        self.handed_in_run.drop_dead()

    def broadcast(self, source: int = 0, others: Iterable[int] | None = None) -> None:
        """Gives one replica's values to others; home's to all, if no others are named."""
        if others is not None:
            others = tuple(others)
            if 0 in others and self.has_changed_in_run(source):
                self.handed_in_run.add(None)  # the first one has it now, and home has not
            super().broadcast(source, others)
            return
        value = self.home.data
        for r, target in enumerate(self.targets):
            if same_kind(target, value):
                target.data.copy_(value)
            else:
                self._give(r, value)
        self.note_known()
        self.handles.drop_dead()

    def set_data(self, data: Tensor) -> None:
        """``p.data = data``: of the current replica; of home and all in the cross context."""
        replica, here = current.replica, self.forward_param()
        if here is not None and replica is not None:
            self._give(here, data)
            self.handed_in_run.add(data)
            replica.run.assigned[self] = True
            return
        self._give_home(data.to(self.replicas.parameter_device))
        for r in range(len(self.copies)):
            self._give(r, data)
        self.note_known()
        self.handles.add(data)

    def _give(self, replica_id: int, data: Tensor) -> None:
        value = data.to(device := self.replicas.devices[replica_id])
        others = (target for r, target in enumerate(self.targets) if r != replica_id)
        if any(share_storage(value, target) for target in (self.home, *others)):
            value = value_on(data, device)
        self.targets[replica_id].data = value
        DATA.__set__(self.copies[replica_id], value)

    def _give_home(self, value: Tensor) -> None:
        self.home.data = value
        DATA.__set__(self.shown, value)
        owner = self.owner()
        if owner is not None:
            raw_set_data(owner, value)

    # Whether it is trained

    def set_requires_grad(self, requires_grad: bool) -> None:
        """Sets it for the current replica; for home and all in the cross-replica context."""
        if self.forward_param() is None:
            self._require_grad_at_home(requires_grad)
        else:
            self.handed_in_run.add(None)  # home follows when the run ends
        super().set_requires_grad(requires_grad)

    def _require_grad_at_home(self, requires_grad: bool) -> None:
        REQUIRES_GRAD.__set__(self.shown, requires_grad)
        self.home.requires_grad_(requires_grad)
        if requires_grad:
            self.gradients.receive(self, self.shown)


class CentralParams(ReplicatedParams):
    """The mirrored parameters of a strategy that keeps them at home. See [Note: Home]."""

    kind = CentralParam

    def __iter__(self) -> Iterator[CentralParam]:
        return cast("Iterator[CentralParam]", super().__iter__())

    def _settle(self) -> None:
        for variable in self:
            if variable.handed_in_run or variable.copies[0]._version != variable.known[0]:
                variable.take(0)

    def _follow_first(self) -> None:
        self._settle()  # what the first replica has done until it failed, as on one device
        super()._follow_first()
