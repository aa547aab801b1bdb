"""Handles: the tensors through which raw storage has left, and may be written unseen.

Variable: one mirrored parameter's copies, and what is known of their coherence.

[Note: Three tensors, one storage]
A parameter ``p`` of N replicas is, per replica r:

    copies[r]    a ReplicaParameter: what the forward pass uses. Autograd accumulates this
                 replica's own gradient, not yet reduced, in its C++ slot.
    targets[r]   an ordinary parameter on the same storage: what optimizers update. Its
                 ``.grad`` is the reduced gradient, which is what users see as ``p.grad``.

and ``p`` itself shares the storage of replica 0. So the local gradient is always apart from the
reduced one: a second backward pass never mixes a reduced gradient with a local one, and an
optimizer steps over plain parameters. ``copies[r].grad`` is a property that waits for the
reduction, wherever it is read. See [Note: Lazy gradients].

[Note: Coherence]
In the cross-replica context the first replica's copy is the truth. What changed there is seen by
its version counter, which all tensors of one storage share, or noted when raw storage is handed
out (``p.data``; as long as that tensor lives), and is carried to the other replicas before they
next run; so is what another thread may have changed while a run went on. A gradient that was
handed out is carried before the next run or optimizer step.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sized
from typing import Any, NoReturn, Protocol

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from mirror.base.dynamo import disable_dynamo
from mirror.base.torch_private import WithoutSubclass
from mirror.execution.current_replica import current
from mirror.execution.replicas import Replicas
from mirror.execution.runner import runner_of
from mirror.replica.params.gradient_hooks import (
    GradientHook,
    refuse_own_hook,
    refuse_post_accumulate_hook,
)
from mirror.replica.params.mirrored_tensor import DATA, REQUIRES_GRAD, raw_set_data, share_storage
from mirror.replica.params.subclasses import (
    copied_once,
    derived_class,
    parameter_like,
    same_kind,
    set_to,
    value_on,
)

_MOST = 8  # that are kept without looking which of them are gone


class StorageAliases(list[Callable[[], object]]):
    """What raw storage of one variable was handed out as, as long as it lives.

    A list, because "is there any?" is asked of every variable before every step.
    """

    def add(self, handle: Tensor | None) -> None:
        """Notes a handle; ``None`` for one that cannot be watched, which counts once."""
        if len(self) > _MOST:
            self.drop_dead()
        self.append(_gone if handle is None else weakref.ref(handle))

    def drop_dead(self) -> None:
        """Forgets those through which nobody can write any more."""
        if self:
            self[:] = [known for known in self if known() is not None]


def _gone() -> None:
    """The handle of raw storage that left in a form which cannot be watched."""


class ReplicaParameter(nn.Parameter):
    """One replica's copy of a mirrored parameter, as its forward pass sees it.

    Attributes:
        arrival_hook: notes that a local gradient has come; there from the first time on that the
            copy requires one, and removed while the copy ``is_silent``: [Note: Silent copies].
        ends_passes: whether a backward pass that reaches it is to end with a reduction.
    """

    variable: ReplicatedParam
    replica_id: int
    arrival_hook: RemovableHandle | None = None
    is_silent = False
    ends_passes = False

    @property
    def grad(self) -> Tensor | None:
        """The reduced gradient; waits for the reduction."""
        return self.variable.gradients.read(self.variable, self.replica_id)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self.variable.gradients.write(self.variable, value)

    @grad.deleter
    def grad(self) -> None:
        self.variable.gradients.write(self.variable, None)

    @property
    def data(self) -> Tensor:
        """The copy's data; setting it moves the target along."""
        data: Tensor = DATA.__get__(self)
        return data

    @data.setter
    def data(self, value: Tensor) -> None:
        self.variable.set_data(value)

    @property
    def requires_grad(self) -> bool:
        """Whether the copy, and its target, require a gradient."""
        required: bool = REQUIRES_GRAD.__get__(self)
        return required

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.variable.set_requires_grad(value)

    def watch(self, arrived: Callable[[Any], object]) -> RemovableHandle:
        """Has ``arrived`` called when autograd has added to the local gradient."""
        register: Callable[..., RemovableHandle] = super().register_post_accumulate_grad_hook
        return register(arrived)

    def register_hook(self, hook: object) -> NoReturn:
        """Refused: it would see the local gradient."""
        refuse_own_hook()

    def register_post_accumulate_grad_hook(self, hook: object) -> NoReturn:
        """Refused: it would run before the gradient is reduced."""
        refuse_post_accumulate_hook()

    def set_(self, source: Any = None, *args: Any, **kwargs: Any) -> Any:
        """``copy.data = source``."""
        return set_to(self, source, *args, **kwargs)

    def requires_grad_(self, requires_grad: bool = True) -> ReplicaParameter:
        """Sets ``requires_grad``."""
        self.variable.set_requires_grad(requires_grad)
        return self

    def plain(self) -> nn.Parameter:
        """Returns what the copy would be if it were not mirrored, on its storage."""
        target = self.variable.targets[self.replica_id]
        plain: nn.Parameter = parameter_like(target, type(target), self, self.requires_grad)
        return plain

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(nn.Parameter(self.detach(), self.requires_grad))

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        return copied_once(self, self.plain, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain().__reduce_ex__(protocol)


class Unreduced(Protocol):
    """Where local gradients are that are not reduced yet; read as plain attributes, for speed.

    Attributes:
        pending: per replica, the copies that have one.
        unsettled: per replica, what goes on by which there may be more than ``pending`` tells.
        deferred: those kept back under ``no_sync``.
        deferring: whether a ``no_sync`` is open.
    """

    pending: tuple[list[ReplicaParameter], ...]
    unsettled: tuple[list[object], ...]
    deferring: bool

    @property
    def deferred(self) -> Sized:
        """Those kept back, by variable."""


class GradientAccess(Protocol):
    """What mirrored parameters ask of those who keep their gradients."""

    @property
    def unreduced(self) -> Unreduced:
        """Where local gradients are that are not reduced yet."""

    def read(self, variable: ReplicatedParam, replica_id: int | None) -> Tensor | None:
        """Returns the gradient that one replica's code, or the cross-replica context, sees."""

    def write(self, variable: ReplicatedParam, value: Tensor | None) -> None:
        """Sets the gradient of the current replica; of all in the cross-replica context."""

    def watch(self, copy: ReplicaParameter) -> None:
        """Has the arrival of local gradients noted, once the copy requires any."""

    def receive(self, variable: ReplicatedParam, parameter: Tensor) -> None:
        """Takes what arrives at the parameter object itself. See [Note: Past resolution]."""

    def add_hook(self, variable: ReplicatedParam, hook: GradientHook) -> RemovableHandle:
        """Has ``hook`` called with the reduced gradient of every backward pass from now on."""

    def replaced(self, variable: ReplicatedParam, known: Tensor, grad: Tensor) -> None:
        """Notes that a reduced gradient has been replaced by another object."""

    def forget(self, variable: ReplicatedParam) -> None:
        """Drops what there is of a variable that is gone; takes no lock."""


class ReplicatedParam:
    """The copies of one mirrored parameter and what is known of their coherence.

    Args:
        parameter: becomes the mirrored one; it is on the first replica's device.
        name: where it was found, for messages.
        mirror: mirrors another parameter as this one is.

    Attributes:
        devices: where each replica's copy is.
        owner: returns the mirrored parameter, ``None`` once it is gone.
        home, shown: the target that optimizers step, and the copy that the cross-replica context
            sees: the first replica's, unless home is a storage of its own.
        leaves: where gradients arrive there, ``shown`` first.
        version: of ``shown`` when all copies were last known to be equal.
        hooks: gradient hooks by handle id. See [Note: Gradient hooks].
        handles: the tensors through which raw storage left in the cross-replica context.
    """

    __slots__ = (
        "__weakref__",
        "copies",
        "devices",
        "gradients",
        "handles",
        "home",
        "hooks",
        "leaves",
        "mirror",
        "name",
        "owner",
        "replicas",
        "shown",
        "targets",
        "version",
    )
    copy_kind: type[ReplicaParameter] = ReplicaParameter

    def __init__(
        self,
        parameter: nn.Parameter,
        name: str,
        replicas: Replicas,
        gradients: GradientAccess,
        mirror: Callable[[nn.Parameter, str], ReplicatedParam],
    ) -> None:
        self.replicas, self.gradients, self.mirror = replicas, gradients, mirror
        self.name, self.devices = name, replicas.places.replica_at(parameter.device)
        self.owner: Callable[[], Tensor | None] = weakref.ref(parameter)
        self.handles = StorageAliases()
        self.hooks: dict[int, GradientHook] = OrderedDict()  # RemovableHandle wants the class
        requires_grad = parameter.requires_grad
        values = self._first_values(parameter.detach())
        kind = type(parameter)
        made = [parameter_like(parameter, kind, value, requires_grad) for value in values]
        self.targets: tuple[nn.Parameter, ...] = tuple(made)
        for target in self.targets:
            target.variable = self  # type: ignore[attr-defined]
        self.copies = tuple(self._copy(r, value, requires_grad) for r, value in enumerate(values))
        self._find_home(parameter)
        self.version = self.shown._version

    def _first_values(self, value: Tensor) -> list[Tensor]:
        """Returns the values of the copies: the first one's is the parameter's own."""
        return [value, *(value_on(value, device) for device in self.devices[1:])]

    def _find_home(self, parameter: nn.Parameter) -> None:
        self.home, self.shown, self.leaves = self.targets[0], self.copies[0], self.copies

    def _copy(self, replica_id: int, value: Tensor, requires_grad: bool) -> ReplicaParameter:
        target = self.targets[replica_id]
        kind = derived_class(self.copy_kind, type(target))
        copy: ReplicaParameter = parameter_like(target, kind, value, requires_grad)
        copy.variable, copy.replica_id = self, replica_id
        self.gradients.watch(copy)
        return copy

    def forward_param(self) -> int | None:
        """Returns the current replica, if it is one of this variable's; ``None`` outside."""
        replica = current.replica
        if replica is not None and replica.replicas is self.replicas:
            return replica.replica_id
        return None

    @disable_dynamo
    def first(self) -> ReplicaParameter:
        """Returns what stands for the parameter in the cross-replica context.

        A compiler that follows a call of a mirrored module ends here, and the call is split.
        """
        if runner_of(self.replicas).runs_elsewhere:
            self.handles.add(None)  # a change would be taken for one of the run's own
        return self.shown

    # Values

    def changed(self) -> bool:
        """Whether the first copy may differ from the others by a change in the cross context."""
        return bool(self.handles) or self.shown._version != self.version

    def expose_storage(self, handle: Tensor | None) -> None:
        """Notes that raw storage left: in the cross-replica context, a possible change."""
        if self.forward_param() is None:
            self.handles.add(handle)

    def broadcast(self, source: int = 0, others: Iterable[int] | None = None) -> None:
        """Gives one replica's values to others: the first one's to all."""
        value = self.targets[source].data
        for r in range(1, len(self.targets)) if others is None else others:
            # Through .data: the other replicas' version counters stay, because a change that
            # may not be one (a look at p.data) must not spoil their saved tensors.
            if same_kind(self.targets[r], value):
                self.targets[r].data.copy_(value)
            else:  # some were given data of another shape or kind
                self._give(r, value)
        self.version = self.shown._version
        self.handles.drop_dead()

    def set_data(self, data: Tensor) -> None:
        """``p.data = data``: of the current replica; of all in the cross-replica context."""
        replica, here = current.replica, self.forward_param()
        for r in range(len(self.copies)) if here is None else (here,):
            self._give(r, data)
        if here is None:
            self.version = self.shown._version
            self.handles.add(data)
        elif replica is not None:
            replica.run.assigned[self] = True

    def _give(self, replica_id: int, data: Tensor) -> None:
        """Gives a replica data in place of what it has."""
        value = data.to(device := self.devices[replica_id])
        others = (target for r, target in enumerate(self.targets) if r != replica_id)
        # Replicas that are given one tensor must not share it.
        if any(share_storage(value, target) for target in others):
            value = value_on(data, device)
        self.targets[replica_id].data = value
        DATA.__set__(self.copies[replica_id], value)
        owner = self.owner()
        if replica_id == 0 and owner is not None:
            raw_set_data(owner, value)

    # Whether it is trained

    def set_requires_grad(self, requires_grad: bool) -> None:
        """Sets it for the current replica; for all in the cross-replica context."""
        replica, here = current.replica, self.forward_param()
        if here is not None and replica is not None:
            if self.copies[here].requires_grad != requires_grad:
                replica.run.assigned.setdefault(self, False)
        for r in range(len(self.copies)) if here is None else (here,):
            self.require_grad_of(r, requires_grad)
        owner = self.owner()
        if owner is not None:
            with WithoutSubclass():
                REQUIRES_GRAD.__set__(owner, requires_grad)
            if requires_grad:
                self.gradients.receive(self, owner)

    def require_grad_of(self, replica_id: int, requires_grad: bool) -> None:
        """Sets it for one replica."""
        copy = self.copies[replica_id]
        REQUIRES_GRAD.__set__(copy, requires_grad)
        self.targets[replica_id].requires_grad_(requires_grad)
        self.gradients.watch(copy)
