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
needs it, and while the cross-replica context has read it.

A reduction leaves the reduced gradient with every replica, on its device. ``p.grad`` in the
cross-replica context is a copy on the parameter device. It is made at the first read, and stays
the same object as long as it is the same gradient. From then on the program may change the copy,
so it is broadcast to all replicas before they next run or add to their gradients. In the other
direction it follows what the replicas add. An optimizer step needs every gradient on the parameter
device: the copies that the program has not read are dropped after the step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from mirror.execution.lifecycle import LifecycleHooks
from mirror.execution.replicas import Replicas
from mirror.execution.run import current
from mirror.execution.runner import Runner
from mirror.replica.gradients.grad_access import GradAccess, copy_without_bucket
from mirror.replica.gradients.grad_reducer import GradReducer
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


@dataclass(slots=True)
class _GradCopy:
    """A gradient that the cross-replica context has read.

    Attributes:
        grad: the gradient on the parameter device.
        source: the first replica's gradient, from which it was copied.
        version: the version of ``source`` when both were last equal.
    """

    grad: Tensor
    source: Tensor
    version: int


class CentralGradReducer(GradReducer):
    """The gradients of parameters on a parameter device.

    Broadcasts the copies there before each reduction, and updates them after it.
    """

    access: CentralAccess

    def _prepare(self) -> None:
        if not self._shown and not self.have_arrived():
            return
        self.access.sync_shown()
        super()._prepare()
        self.access.refresh()

    def flush(self) -> None:
        """Reduces what backward passes in the cross-replica context left pending."""
        if self.have_arrived() or self.deferred:
            self.access.sync_shown()
            self.reduce(self.equal_shares())
            self.access.refresh()


class CentralAccess(GradAccess):
    """The reduced gradients of parameters on a parameter device."""

    def __init__(self, replicas: Replicas, runner: Runner, gradients: CentralGradReducer) -> None:
        super().__init__(replicas, runner, gradients)
        self._seen: dict[ReplicatedParam, _GradCopy] = {}
        gradients.access = self

    def part(self, variables: ReplicatedParams) -> LifecycleHooks:
        """Returns the hooks that keep the reduced gradients of ``variables`` equal."""
        hooks = super().part(variables)

        def recover() -> None:
            hooks.recover()
            self.refresh()

        return LifecycleHooks(
            name=hooks.name,
            prepare=self.sync_shown,
            sync_idle=hooks.sync_idle,
            on_synced=self.refresh,
            recover=recover,
        )

    # Between the parameter device and the replicas

    def fetch(self, variable: ReplicatedParam, source: int = 0) -> Tensor | None:
        """Returns a replica's gradient on the parameter device, copied if it is not there yet."""
        home, grad = variable.home, variable.targets[source].grad
        known = self._seen.get(variable)
        if grad is not None and known is not None and known.source is grad:
            if known.version != grad._version:
                if same_kind(known.grad, grad) and not grad.requires_grad:
                    known.grad.data.copy_(grad)
                else:
                    known.grad = home.grad = _copy_at(grad, home.device)
                known.version = grad._version
            return known.grad
        self._seen.pop(variable, None)
        home.grad = None if grad is None else _copy_at(grad, home.device)
        return home.grad

    def _show(self, variable: ReplicatedParam) -> Tensor | None:
        grad, source = self.fetch(variable), variable.targets[0].grad
        if grad is None or source is None:
            return None
        if variable not in self._seen:
            self._seen[variable] = _GradCopy(grad, source, source._version)
        return copy_without_bucket(grad)

    def sync_shown(self) -> None:
        """Broadcasts the gradients that the program has read, and may have changed."""
        for variable, known in list(self._seen.items()):
            if variable.targets[0].grad is not known.source:
                self._forget_shown(variable)
                continue
            for target in variable.targets:
                grad = target.grad
                if grad is None or not same_kind(grad, known.grad):
                    target.grad = _copy_at(known.grad.detach(), target.device)
                else:
                    grad.data.copy_(known.grad.data)
            source = variable.targets[0].grad
            assert source is not None
            known.source, known.version = source, source._version

    def refresh(self) -> None:
        """Copies the replicas' present gradients to those that the program has read."""
        for variable, known in list(self._seen.items()):
            if variable.targets[0].grad is not known.source:
                self._forget_shown(variable)
            else:
                self.fetch(variable)

    def drop_unseen(self, variables: Iterable[ReplicatedParam]) -> None:
        """Drops the gradients that were copied for a step only."""
        for variable in variables:
            if variable not in self._seen:
                variable.home.grad = None

    def _forget_shown(self, variable: ReplicatedParam) -> None:
        self._seen.pop(variable, None)
        variable.home.grad = None

    # Reading and setting in the cross-replica context

    def _read_outside(self, variable: ReplicatedParam) -> Tensor | None:
        self._runner.check_between_runs("a gradient")
        self.unreduced.flush()
        return self._show(variable)

    def _write_outside(self, variable: ReplicatedParam, value: Tensor | None) -> None:
        self._runner.check_between_runs("a gradient")
        all_replicas = range(len(variable.targets))
        copied = None if value is None else _copy_at(value.detach(), variable.targets[0].device)
        self._put(variable, copied, 0, all_replicas)
        self._seen.pop(variable, None)
        variable.home.grad = value
        if value is not None and copied is not None:
            self._seen[variable] = _GradCopy(value, copied, copied._version)

    def clear(
        self, variables: Sequence[ReplicatedParam], targets: Sequence[Sequence[nn.Parameter]]
    ) -> bool:
        """Drops reduced gradients, as ``GradAccess.clear`` does, and the copies of them."""
        if not super().clear(variables, targets):
            return False
        if self._runner.running is None:
            for variable in variables:
                self._forget_shown(variable)
        return True

    def record_replacement(self, variable: ReplicatedParam, known: Tensor, grad: Tensor) -> None:
        """Does nothing: ``fetch`` and ``refresh`` compare the identity of the gradient."""

    def forget(self, variable: ReplicatedParam) -> None:
        """Drops the state of a variable that was freed; takes no lock."""
        self._seen.pop(variable, None)
        super().forget(variable)


def _copy_at(grad: Tensor, device: torch.device) -> Tensor:
    """Returns a copy on a device; it carries the gradient's graph if there is one."""
    with torch.inference_mode(False), torch.set_grad_enabled(grad.requires_grad):
        return grad.clone().to(device)
