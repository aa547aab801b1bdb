"""Mirrored parameters: one object for the user, one copy per replica.

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
next run. A gradient that was handed out is carried before the next run or optimizer step.

[Note: Past resolution]
What is written in C++ and asks no ``__torch_function__`` gets the object ``p`` itself: extensions,
``torch.jit.script``, the transforms of ``torch.func``. The values are right, those of replica 0,
which every replica has before its step; on several devices torch complains. So ``p`` requires a
gradient as its copies do, and what arrives there belongs to the replica that runs the pass; in a
pass outside ``run``, which is all replicas' common one, it is a summand like any other. The graph
of a forward from before ``p`` was mirrored ends there, too.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._guards import CompileContext
from torch.utils.hooks import RemovableHandle

from mirror.compiler import opaque
from mirror.execution.current import current
from mirror.replica.copies.kinds import derived, parameter_like, refuse_operations
from mirror.replica.copies.parameters import MirroredParameter, ReplicaParameter
from mirror.replica.gradients.arrivals import local_grad, plus, set_local_grad
from mirror.replica.gradients.gradient_hooks import refuse_post_accumulate_hook
from mirror.replica.tensors import DATA, REQUIRES_GRAD, raw_set_data, share_storage

if TYPE_CHECKING:
    from mirror.replica.group import ReplicaGroup

GradientHook = Callable[[Tensor], "Tensor | None"]


class Variable:
    """The copies of one mirrored parameter and what is known of their coherence.

    Attributes:
        name: where the parameter was found, for messages.
        owner: returns the mirrored parameter, ``None`` once it is gone.
        version: of the first copy when all copies were last known to be equal.
        hooks: gradient hooks by handle id. See [Note: Gradient hooks].
        handles: the tensors through which raw storage left in the cross-replica context.
    """

    __slots__ = (
        "__weakref__",
        "copies",
        "group",
        "handles",
        "hooks",
        "name",
        "owner",
        "targets",
        "version",
    )

    def __init__(self, parameter: nn.Parameter, group: ReplicaGroup, name: str) -> None:
        self.group = group
        self.name = name
        self.owner: Callable[[], Tensor | None] = weakref.ref(parameter)
        self.handles: list[Callable[[], object]] = []
        self.hooks: dict[int, GradientHook] = OrderedDict()  # RemovableHandle wants the class
        requires_grad = parameter.requires_grad
        first = parameter.detach()
        values = [first if r == 0 else _value_on(first, d) for r, d in enumerate(group.devices)]
        kind = type(parameter)
        made = [parameter_like(parameter, kind, value, requires_grad) for value in values]
        self.targets: tuple[nn.Parameter, ...] = tuple(made)
        for target in self.targets:
            target.variable = self  # type: ignore[attr-defined]
        self.copies = tuple(self._copy(r, value, requires_grad) for r, value in enumerate(values))
        self.version = self.copies[0]._version

    def _copy(self, replica_id: int, value: Tensor, requires_grad: bool) -> ReplicaParameter:
        target = self.targets[replica_id]
        kind = derived(ReplicaParameter, type(target))
        copy: ReplicaParameter = parameter_like(target, kind, value, requires_grad)
        copy.variable, copy.replica_id = self, replica_id
        if requires_grad:
            self.group.gradients.watch.add(copy)
        return copy

    def here(self) -> int | None:
        """Returns the current replica of this variable's group, ``None`` outside."""
        replica = current.replica
        return replica.replica_id if replica is not None and replica.group is self.group else None

    @opaque
    def first(self) -> ReplicaParameter:
        """Returns what stands for the parameter in the cross-replica context.

        A compiler that follows a call of a mirrored module ends here, and the call is split.
        """
        return self.copies[0]

    # Gradients

    def receive(self, parameter: Tensor) -> None:
        """Takes a gradient that arrives at the parameter object. See [Note: Past resolution]."""
        with torch._C.DisableTorchFunctionSubclass():
            grad = local_grad(parameter)
            set_local_grad(parameter, None)
        here = self.here() or 0
        copy = self.copies[here]
        known = local_grad(copy)
        set_local_grad(copy, plus(known, grad))
        self.group.gradients.pending[here].append(copy)

    def receive_at(self, parameter: Tensor) -> None:
        """Has what arrives at the parameter object received."""
        if "_is_received" not in parameter.__dict__:
            parameter.__dict__["_is_received"] = True
            with torch._C.DisableTorchFunctionSubclass():
                parameter.register_post_accumulate_grad_hook(self.receive)

    def add_hook(self, hook: GradientHook) -> RemovableHandle:
        """Has ``hook`` called with the reduced gradient of every backward pass from now on."""
        self.group.gradients.flush()
        handle = RemovableHandle(self.hooks)
        self.hooks[handle.id] = hook
        self.adopt_hooks(self.hooks)
        return handle

    def adopt_hooks(self, hooks: dict[int, GradientHook]) -> None:
        """Takes over hooks with the dict that their handles remove them from."""
        self.hooks = hooks
        for copy in self.copies:
            self.group.gradients.watch_closely(copy)

    @opaque
    def grad_in(self, replica_id: int) -> Tensor | None:
        """Returns the gradient that one replica's code sees."""
        here = self.here()
        gradients = self.group.gradients
        if here is None:
            return self.first_grad()
        if gradients.deferring:
            return gradients.local(self, replica_id)
        # A compiler that traces a replica's code looks at .grad with its lock held, for which the
        # others would wait: it must not wait for them.
        if gradients.awaited(here) and CompileContext.try_get() is None:
            gradients.observe(here)
        return self.targets[replica_id].grad

    @opaque
    def first_grad(self) -> Tensor | None:
        """Returns the reduced gradient in the cross-replica context, and notes that it left."""
        self.group.check_between_runs("a gradient")
        self.group.gradients.flush()
        grad = self.targets[0].grad
        if grad is not None:
            self.group.handed_out_grads[self] = grad
        return grad

    @opaque
    def set_grad(self, value: Tensor | None) -> None:
        """Sets the gradient of the current replica; of all in the cross-replica context."""
        replica, gradients = current.replica, self.group.gradients
        here = None
        if replica is not None and replica.group is self.group:
            here = replica.replica_id
            if value is not None:
                value = self._own(value, here)
            waits = gradients.pending[here] or gradients.unsettled[here] or gradients.deferred
            if not waits:  # in every zero_grad
                self.targets[here].grad = value
                set_local_grad(self.copies[here], None)
                return
        if here is None and self.group.parallel_pass is not None:
            self.group.parallel_pass.go_alone()
        replicas = range(len(self.copies)) if here is None else self._followers(here)
        for r in replicas:
            target = self.targets[r]
            if value is None or r == (here or 0):
                target.grad = value
            else:
                target.grad = value.detach().clone().to(target.device)
            set_local_grad(self.copies[r], None)
        gradients.drop(self, replicas)
        if here is None:
            self.group.handed_out_grads.pop(self, None)
            if value is not None:
                self.group.handed_out_grads[self] = value

    def _own(self, value: Tensor, here: int) -> Tensor:
        """Returns a gradient that no other replica has: one given to all must be N tensors."""
        others = (target.grad for r, target in enumerate(self.targets) if r != here)
        return value.clone() if any(_are_one(value, grad) for grad in others) else value

    def _followers(self, here: int) -> tuple[int, ...]:
        """Returns a replica and those that sit its run out, if it is the one they will follow."""
        replica: Any = current.replica
        active = replica.run.active
        if here != active[0]:
            return (here,)
        return (here, *(r for r in range(len(self.copies)) if r not in active))

    def carry_grad(self, source: int = 0, others: Iterable[int] | None = None) -> None:
        """Gives one replica's gradient to others: the first one's to all."""
        grad = self.targets[source].grad
        for r in range(1, len(self.targets)) if others is None else others:
            target = self.targets[r]
            if grad is None:
                target.grad = None
            elif not _alike(target.grad, grad):
                target.grad = grad.detach().clone().to(target.device)
            else:
                target.grad.data.copy_(grad.data)  # type: ignore[union-attr]

    # Values

    def changed(self) -> bool:
        """Whether the first copy may differ from the others by a change in the cross context."""
        return bool(self.handles) or self.copies[0]._version != self.version

    def carry(self, source: int = 0, others: Iterable[int] | None = None) -> None:
        """Gives one replica's values to others: the first one's to all."""
        value = self.targets[source].data
        for r in range(1, len(self.targets)) if others is None else others:
            # Through .data: the other replicas' version counters stay, because a change that
            # may not be one (a look at p.data) must not spoil their saved tensors.
            if _alike(self.targets[r], value):
                self.targets[r].data.copy_(value)
            else:  # some were given data of another shape or kind
                self._give(r, value)
        self.version = self.copies[0]._version
        self.handles = [handle for handle in self.handles if handle() is not None]

    def hand_out(self, handle: Tensor | None) -> None:
        if len(self.handles) > 8:
            self.handles = [handle for handle in self.handles if handle() is not None]
        self.handles.append(_gone if handle is None else weakref.ref(handle))

    def set_data(self, data: Tensor) -> None:
        """``p.data = data``: of the current replica; of all in the cross-replica context."""
        here = self.here()
        for r in range(len(self.copies)) if here is None else (here,):
            self._give(r, data)
        if here is None:
            self.version = self.copies[0]._version
            self.hand_out(data)
        else:
            replica: Any = current.replica
            replica.run.assigned[self] = True

    def _give(self, replica_id: int, data: Tensor) -> None:
        """Gives a replica data in place of what it has."""
        device = self.group.devices[replica_id]
        value = data.to(device)
        others = (target for r, target in enumerate(self.targets) if r != replica_id)
        # Replicas that are given one tensor must not share it.
        if any(share_storage(value, target) for target in others):
            value = _value_on(data, device)
        self.targets[replica_id].data = value
        DATA.__set__(self.copies[replica_id], value)
        owner = self.owner()
        if replica_id == 0 and owner is not None:
            raw_set_data(owner, value)

    def set_requires_grad(self, requires_grad: bool) -> None:
        """Sets it for the current replica; for all in the cross-replica context."""
        here = self.here()
        if here is not None and self.copies[here].requires_grad != requires_grad:
            replica: Any = current.replica
            replica.run.assigned.setdefault(self, False)
        for r in range(len(self.copies)) if here is None else (here,):
            self._require_grad(r, requires_grad)
        owner = self.owner()
        if owner is not None:
            with torch._C.DisableTorchFunctionSubclass():
                REQUIRES_GRAD.__set__(owner, requires_grad)
            if requires_grad:
                self.receive_at(owner)

    def _require_grad(self, replica_id: int, requires_grad: bool) -> None:
        copy = self.copies[replica_id]
        REQUIRES_GRAD.__set__(copy, requires_grad)
        self.targets[replica_id].requires_grad_(requires_grad)
        if requires_grad:
            self.group.gradients.watch.add(copy)
            if self.hooks:
                self.group.gradients.watch_closely(copy)

    def follow_first(self) -> None:
        """Makes what the first replica has that of all, after a run that failed."""
        self.carry()
        self.carry_grad()
        requires_grad = self.copies[0].requires_grad
        if any(copy.requires_grad != requires_grad for copy in self.copies):
            self.set_requires_grad(requires_grad)

    def bring_along(self, source: int, idle: Iterable[int]) -> None:
        """Gives replicas that sat a run out what one of the others has now."""
        self.carry(source, idle)
        self.carry_grad(source, idle)
        requires_grad = self.copies[source].requires_grad
        for r in idle:
            if self.copies[r].requires_grad != requires_grad:
                self._require_grad(r, requires_grad)


def mirror_parameter(parameter: nn.Parameter, group: ReplicaGroup, name: str) -> Variable:
    """Turns a parameter into a mirrored one, in place: the object stays the same.

    Raises:
        StrategyError: another strategy has mirrored it, or its class cannot be swapped.
    """
    kind = type(parameter)
    refuse_operations(kind, name)
    if getattr(parameter, "_post_accumulate_grad_hooks", None):
        refuse_post_accumulate_hook()
    grad = parameter.grad
    if parameter.device != group.devices[0]:
        parameter.data = parameter.data.to(group.devices[0])
    variable = Variable(parameter, group, name)
    if parameter._backward_hooks:
        variable.adopt_hooks(parameter._backward_hooks)
        parameter._backward_hooks = None
    group.own(parameter, variable)
    parameter.grad = None
    if parameter.requires_grad:
        variable.receive_at(parameter)
    parameter._mirrored = variable  # type: ignore[attr-defined]
    parameter.__class__ = derived(MirroredParameter, kind)
    if grad is not None:
        variable.set_grad(grad)
    return variable


def _value_on(value: Tensor, device: torch.device) -> Tensor:
    """Returns a copy of ``value`` in memory of its own, with its strides."""
    return value.detach().to(device, copy=True)


def variable_of(key: Any) -> Variable | None:
    """Returns the variable that a parameter, a copy or a target belongs to."""
    if isinstance(key, MirroredParameter):
        return key._mirrored
    variable: Variable | None = getattr(key, "variable", None)
    return variable


def _gone() -> None:
    """The handle of raw storage that left in a form which cannot be watched."""


def _alike(a: Tensor | None, b: Tensor) -> bool:
    """Whether ``b`` can be copied into ``a``."""
    return (
        a is not None
        and a.layout is b.layout is torch.strided
        and a.shape == b.shape
        and a.dtype == b.dtype
    )


def _are_one(a: Tensor, b: Tensor | None) -> bool:
    """Whether a change of one gradient changes another."""
    if b is None or a is b:
        return a is b
    return a.layout is b.layout is torch.strided and share_storage(a, b)
