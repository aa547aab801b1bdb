"""ReplicatedParam: the copies of one mirrored parameter, and how they are kept equal.

[Note: Three tensors, one storage]
A parameter ``p`` of N replicas has, per replica r:

    copies[r]    a ReplicaParameter: the forward pass uses it. Autograd accumulates this replica's
                 local gradient in its C++ slot.
    targets[r]   an ordinary parameter on the same storage: optimizers update it. Its ``.grad`` is
                 the reduced gradient, which users see as ``p.grad``.

``p`` itself shares the storage of replica 0. Local and reduced gradients are never in the same
place, so a second backward pass cannot mix them, and an optimizer steps over plain parameters.
``copies[r].grad`` is a property that waits for the reduction: [Note: Lazy gradients].

[Note: Coherence]
In the cross-replica context the first replica's copy is the truth. A change there is broadcast to
the other replicas before they next run. Changes are detected by the version counter, which all
tensors of one storage share. Raw storage (``p.data``) can be written without a new version, so
while a tensor that exposes it lives, the value counts as changed. The same holds for writes of
another thread during a run. A gradient that the program has read is broadcast before the next run
or optimizer step.

A hook of a parameter, ``p.register_hook``, sees what it would see on one device: once per backward
pass, the gradient over the whole batch, which it may replace.

    backward()               a pass that reaches a parameter with hooks is reduced when it ends,
                             also under ``no_sync``; the hooks get the first replica's reduced
                             gradient before it is added to ``.grad``, and all replicas take their
                             result
    torch.autograd.grad      outside ``run`` the hooks get the sum over the copies, which is
                             returned; inside, where a replica gets its own gradient, it raises
                             StrategyError for a parameter with hooks
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sized
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from mirror.base.dynamo import disable_dynamo
from mirror.base.torch_private import WithoutSubclass
from mirror.errors import StrategyError
from mirror.execution.replicas import Replicas
from mirror.execution.run import current
from mirror.execution.runner import runner_of
from mirror.replica.params.mirrored_tensor import (
    DATA,
    REQUIRES_GRAD,
    copy_once,
    derived_class,
    parameter_like,
    raw_set_data,
    same_kind,
    set_to,
    share_storage,
    value_on,
)
from mirror.replica.params.shared_memory import StorageIndex, lie_alike, view_in

_MAX_ALIASES = 8  # before dead ones are dropped


class StorageAliases(list[Callable[[], object]]):
    """The live tensors that expose raw storage of one variable, so that it may be written.

    A list, because its truth value is read for every variable before every step.
    """

    def add(self, handle: Tensor | None) -> None:
        """Adds a tensor; of a view, the buffer that it is a part of, as views die at once.

        ``None`` is an alias that is not a tensor, which counts as dead already.
        """
        base = None if handle is None else handle._base
        if base is not None and not isinstance(base, ReplicaParameter):
            handle = base
        if len(self) > _MAX_ALIASES:
            self.drop_dead()
        self.append(_dead_reference if handle is None else weakref.ref(handle))

    def drop_dead(self) -> None:
        """Drops the aliases that no longer exist."""
        if self:
            self[:] = [reference for reference in self if reference() is not None]

    def are_live(self) -> bool:
        """Whether an alias exists."""
        return any(reference() is not None for reference in self)

    def versions(self) -> list[int | None]:
        """Returns the versions of the aliases: an operation in place raises one."""
        aliases = [reference() for reference in self]
        return [alias._version if isinstance(alias, Tensor) else None for alias in aliases]


def _dead_reference() -> None:
    """The weak reference to an alias that is not a tensor, such as a NumPy array."""


class ReplicaParameter(nn.Parameter):
    """One replica's copy of a mirrored parameter, as its forward pass sees it.

    Attributes:
        arrival_hooks: record that a local gradient has arrived. They exist once the copy has
            required a gradient, and are removed while ``is_silent``: ``grad_tracker.py``.
        ends_passes: whether a backward pass that reaches the copy ends with a reduction.
        flat_at: the address that cuDNN's flattening has given it; 0 before, and once it has moved.
    """

    variable: ReplicatedParam
    replica_id: int
    arrival_hooks: tuple[RemovableHandle, ...] = ()
    is_silent = False
    ends_passes = False
    flat_at = 0

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
        """The copy's data; setting it also sets the target's."""
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

    def on_accumulate(self, callback: Callable[[Any], object]) -> RemovableHandle:
        """Registers a function that is called when autograd has added to the local gradient."""
        register: Callable[..., RemovableHandle] = super().register_post_accumulate_grad_hook
        return register(callback)

    def register_hook(self, hook: object) -> NoReturn:
        """Raises StrategyError: the hook would see the local gradient."""
        refuse_own_hook()

    def register_post_accumulate_grad_hook(self, hook: object) -> NoReturn:
        """Raises StrategyError: the hook would run before the gradient is reduced."""
        refuse_post_accumulate_hook()

    def set_(self, source: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Does the same as ``copy.data = source``; the source is a tensor."""
        return set_to(self, source, *args, **kwargs)

    def requires_grad_(self, requires_grad: bool = True) -> ReplicaParameter:
        """Sets ``requires_grad``."""
        self.variable.set_requires_grad(requires_grad)
        return self

    def make_plain(self) -> nn.Parameter:
        """Returns an ordinary parameter on the copy's storage, of its class before mirroring."""
        target = self.variable.targets[self.replica_id]
        plain: nn.Parameter = parameter_like(target, type(target), self, self.requires_grad)
        return plain

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(nn.Parameter(self.detach(), self.requires_grad))

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        return copy_once(self, self.make_plain, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.make_plain().__reduce_ex__(protocol)


class Deferred(Protocol):
    """The gradients deferred by ``no_sync``.

    Attributes:
        is_open: whether a ``no_sync`` is open.
        has_passes: whether passes were deferred since the last reduction.
    """

    is_open: bool
    has_passes: bool


class Unreduced(Protocol):
    """The local gradients that are not reduced yet; plain attributes, for speed.

    Attributes:
        pending: per replica, the copies that have a local gradient.
        unsettled: per replica, running passes and buckets; while there are any, ``pending`` is
            incomplete.
        lent: reduced gradients in memory that the next pass writes.
        deferred: the gradients deferred by ``no_sync``.
        scattered: the reduced gradients of which each replica has a part.
    """

    pending: tuple[list[ReplicaParameter], ...]
    unsettled: tuple[list[object], ...]

    @property
    def lent(self) -> Sized:
        """The reduced gradients in memory that the next pass writes."""

    @property
    def deferred(self) -> Deferred:
        """The deferred gradients."""

    @property
    def scattered(self) -> Sized:
        """The records of scattered gradients."""


class GradientAccess(Protocol):
    """The gradients of mirrored parameters, implemented by ``gradients/grad_access.py``."""

    @property
    def unreduced(self) -> Unreduced:
        """The local gradients that are not reduced yet."""

    def read(self, variable: ReplicatedParam, replica_id: int | None) -> Tensor | None:
        """Returns the gradient that one replica's code, or the cross-replica context, sees."""

    def write(self, variable: ReplicatedParam, value: Tensor | None) -> None:
        """Sets the gradient of the current replica; of all in the cross-replica context."""

    def track(self, copy: ReplicaParameter) -> None:
        """Tracks the local gradients of a copy, once it requires them."""

    def receive(self, variable: ReplicatedParam, parameter: Tensor) -> None:
        """Moves gradients of the parameter object to a copy. See ``replicated_params.py``."""

    def add_hook(self, variable: ReplicatedParam, hook: GradientHook) -> RemovableHandle:
        """Registers a hook that gets the reduced gradient of every backward pass from now on."""

    def record_replacement(self, variable: ReplicatedParam, known: Tensor, grad: Tensor) -> None:
        """Records that another object has replaced a reduced gradient."""

    def forget(self, variable: ReplicatedParam) -> None:
        """Drops the state of a variable that was freed; takes no lock."""


def refuse_sparse(parameter: Tensor, name: str) -> None:
    """Raises StrategyError if a parameter to be trained is sparse; a frozen one may be."""
    if parameter.layout is not torch.strided:
        layout = str(parameter.layout).removeprefix("torch.")
        raise StrategyError(
            f"parameter {name!r} is a {layout} tensor: an optimizer's step gives it new memory, "
            "which its replicas do not see; make a parameter of its values, keep its indices in a "
            "buffer, and make the sparse tensor in forward"
        )


class ReplicatedParam:
    """The copies of one mirrored parameter, and the state of their coherence.

    Args:
        parameter: the parameter to mirror; it is on the first replica's device.
        name: the parameter's path, for messages.
        mirror: mirrors another parameter in the same way.
        memory: where the strategy's parameters lie. See [Note: Shared memory].

    Attributes:
        devices: the device of each replica's copy.
        owner: returns the mirrored parameter; ``None`` once it is freed.
        home, shown: the target that optimizers step in the cross-replica context, and the copy
            that it sees. The first replica's, unless there is a parameter device.
        leaves: the tensors where gradients arrive in the cross-replica context, ``shown`` first.
        version: the version of ``shown`` when all copies were last equal.
        num_moves: how often a copy got another storage.
        hooks: the gradient hooks, by handle id; see ``replicated_param.py``.
        handles: the tensors that expose raw storage in the cross-replica context.
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
        "memory",
        "mirror",
        "name",
        "num_moves",
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
        memory: StorageIndex[ReplicatedParam],
    ) -> None:
        self.replicas, self.gradients, self.mirror = replicas, gradients, mirror
        self.name, self.devices = name, replicas.mesh.peers_of(parameter.device)
        self.owner: Callable[[], Tensor | None] = weakref.ref(parameter)
        self.handles = StorageAliases()
        self.num_moves = 0
        self.hooks: dict[int, GradientHook] = OrderedDict()  # RemovableHandle needs this class
        self.memory = memory
        requires_grad = parameter.requires_grad
        values = self._first_values(parameter.detach())
        kind = type(parameter)
        self.targets: tuple[nn.Parameter, ...] = tuple(
            parameter_like(parameter, kind, value, requires_grad) for value in values
        )
        for target in self.targets:
            target.variable = self  # type: ignore[attr-defined]
        self.copies = tuple(self._copy(r, value, requires_grad) for r, value in enumerate(values))
        self._find_home(parameter)
        self.version = self.shown._version
        memory.enter(self)

    def _first_values(self, value: Tensor) -> list[Tensor]:
        """Returns the values of the copies; the first is the parameter's own tensor."""
        twin = self.memory.find(value, self.name)
        if twin is None:
            return [value, *(value_on(value, device) for device in self.devices[1:])]
        return [value, *(view_in(twin, value, target) for target in twin.targets[1:])]

    def _find_home(self, parameter: nn.Parameter) -> None:
        self.home, self.shown, self.leaves = self.targets[0], self.copies[0], self.copies

    def _copy(self, replica_id: int, value: Tensor, requires_grad: bool) -> ReplicaParameter:
        target = self.targets[replica_id]
        kind = derived_class(self.copy_kind, type(target))
        copy: ReplicaParameter = parameter_like(target, kind, value, requires_grad)
        copy.variable, copy.replica_id = self, replica_id
        self.gradients.track(copy)
        return copy

    def forward_param(self) -> int | None:
        """Returns the index of the current replica; ``None`` outside this variable's replicas."""
        replica = current.replica
        if replica is not None and replica.replicas is self.replicas:
            return replica.replica_id
        return None

    @disable_dynamo
    def first_copy(self) -> ReplicaParameter:
        """Returns the tensor that the parameter resolves to in the cross-replica context.

        Dynamo stops tracing here, so a mirrored module's call is split, not compiled as one.
        """
        if runner_of(self.replicas).runs_elsewhere:
            # The end of that run marks all copies as synced, which would hide a write here.
            self.handles.add(None)
        return self.shown

    # Values

    def has_changed(self) -> bool:
        """Whether the value may have changed in the cross-replica context."""
        return bool(self.handles) or self.shown._version != self.version

    def expose_storage(self, handle: Tensor | None) -> None:
        """Records that raw storage is exposed; in the cross-replica context it may be written."""
        if self.forward_param() is None:
            self.handles.add(handle)
        elif (replica := current.replica) is not None and replica.run.is_trial:
            replica.run.assigned.setdefault(self, False)

    def broadcast(self, source: int = 0, others: Iterable[int] | None = None) -> None:
        """Copies one replica's values to others; by default the first replica's to all."""
        value = self.targets[source].data
        for r in range(1, len(self.targets)) if others is None else others:
            # Through .data, which does not increase the version counter: p.data may only have
            # been read, and then the replicas' saved tensors must stay valid.
            if same_kind(self.targets[r], value):
                self.targets[r].data.copy_(value)
            else:  # p.data = ... has changed the shape, dtype or layout
                self._set_replica_data(r, value)
        self.version = self.shown._version
        self.handles.drop_dead()

    def set_data(self, data: Tensor) -> None:
        """Sets the data of the current replica; of all in the cross-replica context.

        Raises:
            StrategyError: it shares memory with another parameter in part.
        """
        replica, replica_id = current.replica, self.forward_param()
        if replica_id is not None:
            self._set_replica_data(replica_id, data)
            if replica is not None:
                replica.run.assigned[self] = True
            return
        twin = self.memory.find(data, self.name, but=self)
        for r in range(len(self.copies)):
            own = data if twin is None or r == 0 else view_in(twin, data, twin.targets[r])
            self._set_replica_data(r, own)
        self.version = self.shown._version
        self.handles.add(data)

    def _set_replica_data(self, replica_id: int, data: Tensor) -> None:
        """Replaces the data of one replica's copy and target."""
        value = data.to(device := self.devices[replica_id])
        others = (target for r, target in enumerate(self.targets) if r != replica_id)
        # Replicas that assign one tensor must not share its memory.
        if any(share_storage(value, target) for target in others):
            value = value_on(data, device)
        self.num_moves += 1
        self.memory.num_moves += 1
        self.targets[replica_id].data = value
        copy = self.copies[replica_id]
        DATA.__set__(copy, value)
        copy.flat_at = 0
        owner = self.owner()
        if replica_id == 0 and owner is not None:
            raw_set_data(owner, value)
        if replica_id == 0 and (current.replica is None or current.replica.tracing is None):
            self.memory.enter(self)  # the tensors of a trace have no addresses

    def follow_leaf(self, leaf: ReplicaParameter) -> bool:
        """Has the target, and ``p``, follow a leaf that C++ has given other memory.

        Code below Python, such as cuDNN's flattening of weights, sets the data of one tensor.

        Returns:
            Whether the leaf had other memory than the target.
        """
        if lie_alike(leaf, self.targets[leaf.replica_id]):
            return False
        self._set_replica_data(leaf.replica_id, DATA.__get__(leaf))
        return True

    def follow_leaves(self) -> None:
        """Has all tensors follow leaves that have other memory or strides, outside ``run``.

        If only ``shown`` has, it is as if the program had assigned ``p.data``.
        """
        pairs = zip(self.copies, self.targets, strict=True)
        is_shown_alone = all(c is self.shown or lie_alike(c, target) for c, target in pairs)
        if not is_shown_alone:
            for leaf in self.leaves:
                self.follow_leaf(leaf)
        elif not lie_alike(self.shown, self.home):
            self.set_data(DATA.__get__(self.shown))

    def follow_target(self, replica_id: int) -> bool:
        """Has the copy, and ``p``, follow a target to which a step has given other data.

        A step or a hook may do ``p.data = ...`` with the ordinary parameters that it has.

        Returns:
            Whether the target had other memory than the copy.
        """
        target = self.targets[replica_id]
        if lie_alike(target, self.copies[replica_id]):
            return False
        self._set_replica_data(replica_id, target.data)
        return True

    def explain_apart(self) -> str | None:
        """Returns which of its tensors are not one memory, as they must be; else ``None``."""
        pairs: list[tuple[Tensor, Tensor, str]] = [
            (self.targets[r], copy, f"copies[{r}] and targets[{r}]")
            for r, copy in enumerate(self.copies)
        ]
        pairs.append((self.home, self.shown, "the copy outside run and what optimizers step"))
        owner = self.owner()
        with WithoutSubclass():
            if owner is not None:
                pairs.append((self.shown, owner, "the parameter object and its first copy"))
            return next((what for a, b, what in pairs if not lie_alike(a, b)), None)

    # requires_grad

    def set_requires_grad(self, requires_grad: bool) -> None:
        """Sets it for the current replica; for all in the cross-replica context."""
        replica, replica_id = current.replica, self.forward_param()
        if replica_id is not None and replica is not None:
            if self.copies[replica_id].requires_grad != requires_grad:
                replica.run.assigned.setdefault(self, False)
        for r in range(len(self.copies)) if replica_id is None else (replica_id,):
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
        self.gradients.track(copy)


GradientHook = Callable[[Tensor], "Tensor | None"]


def apply_hooks(
    hooks: Mapping[int, GradientHook], grad: Tensor, *, is_batched: bool = False
) -> Tensor:
    """Returns a gradient after it has passed through a variable's hooks.

    Args:
        is_batched: whether the first dimension enumerates gradients; hooks do not see it.
    """

    def call_hooks(grad: Tensor) -> Tensor:
        for hook in tuple(hooks.values()):
            replaced = hook(grad)
            grad = grad if replaced is None else replaced
        return grad

    if not hooks:
        return grad
    return torch.func.vmap(call_hooks)(grad) if is_batched else call_hooks(grad)


def refuse_own_hook() -> NoReturn:
    """Raises StrategyError: the hook would get one replica's gradient."""
    raise StrategyError(
        "a gradient hook of a parameter sees the gradient of the whole batch, so it is "
        "registered once: call register_hook outside strategy.run, and outside forward"
    )


def refuse_post_accumulate_hook() -> NoReturn:
    """Raises StrategyError: the hook would run before the gradient is reduced."""
    raise StrategyError(
        "a post-accumulate hook would run before this parameter's gradient is reduced over the "
        "replicas; read p.grad after backward(), or use register_hook"
    )
