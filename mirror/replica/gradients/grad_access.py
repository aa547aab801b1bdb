"""Access to reduced gradients: how ``p.grad`` is read, set, cleared and kept equal on replicas.

A read waits until the gradients are reduced: [Note: Lazy gradients]. A gradient that the
cross-replica context has read may have been changed, so it is broadcast before the next run. A
gradient that replicas set inside ``run`` must be the same on all of them.

A backend that packs moves gradients into flat buffers, reduces them there, and leaves them there:
``p.grad`` is then a view of a buffer, with the strides that autograd gave it. Nothing is copied
back. The sum includes the factor of a mean; only NCCL multiplies afterwards.

    moved           gradients that share a pack of ``bytes_per_pack``
    left in place   a gradient alone in its pack, one with gaps, or with strides that differ
                    between replicas; every gradient with "host", which packs nothing
    copied back     with a ``wire_dtype``: the cast back writes every byte anyway

To autograd the gradient is not a view: it has a version of its own. Every reduction creates new
buffers and new gradients, in a few calls for all of them, so a gradient that the program has kept
is never overwritten, whatever keeps it; if ``.grad`` is still set, the sum is added to it. Memory
is that of one device, too. Only buffers that the program never sees are used again: those of
compiled modules, in ``packed_grads.py``. A read copies what is there.

A buffer lives as long as any gradient in it, so a kept gradient keeps at most ``bytes_per_pack``
alive. ``copy.deepcopy`` and pickle would copy the whole storage, so ``copy_without_bucket`` makes
them copy the gradient alone.

On GPUs a buffer belongs to the compute stream on which it was created. The streams of the backward
passes are recorded in ``GradTracker.streams``, because passes wrote the gradients there and the
program may use them there next. The allocator is told of these streams for each buffer if they are
others than that one, and for each gradient if a pass has ever used another one: a forward pass may
have streams of its own.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain, repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from mirror.base.bitwise import have_equal_numbers
from mirror.base.dynamo import disable_dynamo
from mirror.base.torch_private import WithoutSubclass, compile_context, queue_callback
from mirror.errors import StrategyError
from mirror.execution.lifecycle import LifecycleHooks, WhilePending
from mirror.execution.replicas import Replicas
from mirror.execution.run import Replica, Run, current, replica_of
from mirror.execution.runner import Runner
from mirror.replica.gradients.exposed_grads import broadcast_grad, copy_for
from mirror.replica.gradients.grad_reducer import GradReducer
from mirror.replica.gradients.ready_grads import (
    add_grads,
    are_usual,
    local_grad,
    set_local_grad,
)
from mirror.replica.params.mirrored_tensor import GRAD, share_storage
from mirror.replica.params.replicated_param import GradientHook, ReplicaParameter, ReplicatedParam
from mirror.replica.params.replicated_params import ReplicatedParams

Keep = Callable[[Sequence[Tensor]], list[Tensor]]

_MAX_GPU_COMPARISONS = 64  # of gradients that replicas have set; each one waits for the GPU


class GradAccess:
    """The reduced gradients of mirrored parameters; a read reduces them first.

    Attributes:
        unreduced: the gradients that are not reduced yet.
        exposed: the gradients that the cross-replica context has read, and may have changed.
        assigned: by parameter and replica, the gradients that replicas have set since a step.
    """

    def __init__(self, replicas: Replicas, runner: Runner, gradients: GradReducer) -> None:
        self._replicas, self._runner = replicas, runner
        self.unreduced = gradients
        self.exposed = gradients.exposed
        self._common: dict[ReplicatedParam, tuple[Tensor | None, Keep]] = {}
        self.assigned: dict[ReplicatedParam, dict[int, weakref.ref[Tensor]]] = {}
        self._num_comparisons = _MAX_GPU_COMPARISONS

    def part(self, variables: ReplicatedParams) -> LifecycleHooks:
        """Returns the hooks that keep the reduced gradients of ``variables`` equal."""

        def sync_idle(source: int, idle: Sequence[int]) -> None:
            for variable in variables:
                broadcast_grad(variable, source, idle)

        def recover() -> None:
            gradients = self.unreduced
            if gradients.scattered and gradients.scatter is not None:
                gradients.scatter.follow_first()
            for variable in variables:
                broadcast_grad(variable)
            self.exposed.refresh()

        return LifecycleHooks(
            name="reduced gradients",
            prepare=(
                WhilePending(self._common, self.distribute_common),
                WhilePending(self.exposed.grads, self.exposed.sync),
            ),
            sync_idle=sync_idle,
            on_synced=self.exposed.refresh,
            recover=recover,
        )

    def set_common(
        self, variables: Sequence[ReplicatedParam], grads: Sequence[Tensor], keep: Keep
    ) -> None:
        """Sets the gradients of all replicas; ``distribute_common`` copies them when needed.

        A gradient that nothing reads before the next compiled step is never copied.

        Args:
            grads: of the first of the variables; the others have none from now on.
            keep: returns gradients, with copies of those that the next compiled step overwrites.
        """
        all_grads = chain(grads, repeat(None))
        self._common.update(zip(variables, zip(all_grads, repeat(keep)), strict=False))

    def distribute_common(self) -> None:
        """Gives the replicas the gradients of ``set_common``, in memory of their own."""
        if self.unreduced.lent:
            self.unreduced.own_grads()
        common = dict(self._common)
        by_step: dict[Keep, list[ReplicatedParam]] = {}
        for variable, (grad, keep) in common.items():
            if grad is not None:
                by_step.setdefault(keep, []).append(variable)
        kept: dict[ReplicatedParam, Tensor] = {}
        for keep, variables in by_step.items():
            grads: Any = [common[variable][0] for variable in variables]
            kept.update(zip(variables, keep(grads), strict=True))
        self._common.clear()
        for variable in common:
            grad = kept.get(variable)
            for r, target in enumerate(variable.targets):
                target.grad = grad if grad is None or r == 0 else copy_for(grad, target)

    # Reading and setting

    @disable_dynamo
    def read(self, variable: ReplicatedParam, replica_id: int | None) -> Tensor | None:
        """Returns the gradient that one replica's code, or the cross-replica context, sees."""
        replica, gradients = replica_of(self._replicas), self.unreduced
        if replica is None or replica_id is None:
            return self._read_outside(variable)
        for packed in gradients.lent:
            packed.own(replica_id)
        if gradients.deferred.is_open:
            return gradients.local_gradient(variable, replica_id)
        # A compiler that traces a replica's code holds a lock while it reads .grad. Other
        # replicas may wait for that lock, so this read must not wait for them.
        if gradients.must_reduce(replica.replica_id) and compile_context() is None:
            gradients.observe(replica)
        return variable.targets[replica_id].grad

    def _read_outside(self, variable: ReplicatedParam) -> Tensor | None:
        """Returns the reduced gradient, and records that the cross-replica context has it."""
        self._runner.check_between_runs("a gradient")
        if self._common:
            self.distribute_common()
        self.unreduced.flush()
        if self.unreduced.lent:
            self.unreduced.own_grads()
        if self.unreduced.scattered:
            self.unreduced.gather()
        return self.exposed.show(variable)

    @disable_dynamo
    def write(self, variable: ReplicatedParam, value: Tensor | None) -> None:
        """Sets the current replica's gradient; in the cross-replica context that of all."""
        replica = replica_of(self._replicas)
        if replica is None:
            self._write_outside(variable, value)
            return
        r, gradients = replica.replica_id, self.unreduced
        if value is not None:
            value = gradients.tracker.mutex.call(self._record_assigned, variable, value, replica)
        waits = gradients.pending[r] or gradients.unsettled[r] or gradients.deferred.has_passes
        if not waits and not gradients.scattered:  # the fast path of zero_grad
            variable.targets[r].grad = value
            set_local_grad(variable.copies[r], None)
            return
        self._put(variable, value, r, _add_idle_replicas(replica))

    def _record_assigned(
        self, variable: ReplicatedParam, value: Tensor, replica: Replica
    ) -> Tensor:
        """Records what a replica sets; returns it, or a clone if another replica has its memory.

        Later gradients are added in place, so each replica needs memory of its own.
        """
        r, assigned = replica.replica_id, self.assigned.setdefault(variable, {})
        grads: Iterable[Tensor | None]
        if replica.run.lockstep.takes_turns:
            grads = (target.grad for i, target in enumerate(variable.targets) if i != r)
        else:  # another replica's ``.grad`` is not read: [Note: Slots of replicas at once]
            grads = [known() for i, known in assigned.items() if i != r]
            if r != 0:
                grads = [*grads, self.exposed.find(variable)]
        if any(_is_same_memory(value, grad) for grad in grads):
            value = value.clone()
        assigned[r] = weakref.ref(value)
        return value

    def _write_outside(self, variable: ReplicatedParam, value: Tensor | None) -> None:
        self._runner.check_between_runs("a gradient")
        self._common.pop(variable, None)
        self._put(variable, self.exposed.put(variable, value), 0, range(len(variable.copies)))

    def _put(
        self, variable: ReplicatedParam, value: Tensor | None, owner: int, replicas: Sequence[int]
    ) -> None:
        """Gives the owner ``value`` and other replicas copies, and drops unreduced gradients."""
        for r in replicas:
            target = variable.targets[r]
            target.grad = value if value is None or r == owner else copy_for(value, target)
        self.unreduced.drop(variable, replicas)

    def clear(
        self, variables: Sequence[ReplicatedParam], targets: Sequence[Sequence[nn.Parameter]]
    ) -> bool:
        """Drops the reduced gradients of the current replica; outside ``run`` those of all.

        Args:
            targets: per replica, the ordinary parameters of ``variables``.

        Returns:
            False, and drops nothing, if gradients are pending or deferred.
        """
        replica, gradients = current.replica, self.unreduced
        if replica is not None and replica.replicas is self._replicas:
            r = replica.replica_id
            if gradients.deferred.has_passes:
                return False
            if gradients.unsettled[r] or gradients.pending[r] or gradients.tracker.in_flight:
                if gradients.tracker.has_arrived(r):
                    return False
            targets = [targets[r]]
            if gradients.scattered and gradients.scatter is not None:
                gradients.scatter.drop_all_of(variables, r)
        else:
            self._runner.check_between_runs("a gradient")
            if gradients.tracker.have_arrived() or gradients.deferred.has_passes:
                self.distribute_common()
                return False
            if self._common:
                for variable in variables:
                    self._common.pop(variable, None)
            if self.exposed.grads:
                for variable in variables:
                    self.exposed.drop(variable)
            if gradients.scattered and gradients.scatter is not None:
                gradients.scatter.drop_all_of(variables, None)
        for mine in targets:
            deque(map(GRAD.__set__, mine, repeat(None)), maxlen=0)
        if gradients.lent and replica is None:
            gradients.lent[:] = [p for p in gradients.lent if not p.is_cleared_with(variables)]
        return True

    def zero(self, targets: Sequence[Sequence[nn.Parameter]]) -> bool:
        """Fills the reduced gradients of all replicas with zeros, outside ``run``.

        Args:
            targets: per replica, the ordinary parameters.

        Returns:
            False, and changes nothing, inside ``run`` and for gradients that are not dense.
        """
        gradients = self.unreduced
        if current.replica is not None or self._replicas.has_parameter_device:
            return False
        self._runner.check_between_runs("a gradient")
        self.distribute_common()
        gradients.flush()
        if gradients.scattered:
            return False
        by_replica = [[t.grad for t in mine if t.grad is not None] for mine in targets]
        if not all(map(are_usual, by_replica)):
            return False
        with torch.no_grad():
            for grads in filter(None, by_replica):
                torch._foreach_zero_(grads)
        return True

    # Keeping them equal

    def refuse_unequal(self, run: Run) -> None:
        """Compares the gradients that the replicas of a run have set, before a step.

        On GPUs only the first comparisons of a process are made, as each waits for the device.

        Raises:
            StrategyError: they differ, so that the replicas' parameters would diverge.
        """
        assigned, self.assigned = self.assigned, {}
        for variable in assigned:
            if variable.devices[0].type != "cpu":
                self._num_comparisons -= 1
                if self._num_comparisons < 0:
                    return
            grads = [variable.targets[r].grad for r in run.active]
            if not all(_have_equal_values(grad, grads[0]) for grad in grads):
                raise StrategyError(
                    f"the replicas have set the gradient of parameter {variable.name!r} each to "
                    "its own value; a gradient that is set inside run is taken as it is, and must "
                    "be the same on all replicas before optimizer.step: all_reduce it with "
                    "mirror.get_replica_context().all_reduce('mean', gradient) (with 'sum' of "
                    "weighted gradients if the parts differ in size), or set it outside run"
                )

    def record_replacement(self, variable: ReplicatedParam, known: Tensor, grad: Tensor) -> None:
        """Records that another object has replaced a reduced gradient."""
        self.exposed.replace(variable, known, grad)

    def forget(self, variable: ReplicatedParam) -> None:
        """Drops the state of a variable that was freed; takes no lock."""
        self.exposed.drop(variable)
        self._common.pop(variable, None)
        self.assigned.pop(variable, None)
        self.unreduced.forget(variable)

    # Arrival of local gradients

    def track(self, copy: ReplicaParameter) -> None:
        """Tracks the local gradients of a copy, once it requires them."""
        self.unreduced.tracker.changes += 1
        if not copy.requires_grad:
            return
        self.unreduced.tracker.add(copy)
        if copy.variable.hooks and not copy.ends_passes:
            copy.ends_passes = True
            # Weakly: the garbage collector does not see what hooks of autograd refer to.
            copy.on_accumulate(partial(_reduce_after_backward, weakref.ref(self)))

    def add_hook(self, variable: ReplicatedParam, hook: GradientHook) -> RemovableHandle:
        """Registers a hook that gets the reduced gradient of each later backward pass."""
        self._runner.check_between_runs("a hook of a gradient")
        self.unreduced.flush()
        handle = RemovableHandle(variable.hooks)
        variable.hooks[handle.id] = hook
        for copy in variable.copies:
            self.track(copy)
        return handle

    def end_backward(self) -> None:
        """Reduces the gradients of the backward pass that ends, for the hooks."""
        replica, gradients = replica_of(self._replicas), self.unreduced
        gradients.tracker.find(None if replica is None else replica.replica_id)
        if replica is None:
            gradients.flush()
        elif gradients.must_reduce(replica.replica_id):
            gradients.observe(replica)

    def receive(self, variable: ReplicatedParam, parameter: Tensor) -> None:
        """Moves gradients that the parameter object gets to a replica's copy, from now on."""
        if "_is_received" in parameter.__dict__:
            return
        parameter.__dict__["_is_received"] = True
        # Weak, because the variable may hold the parameter and gc does not see through hooks.
        reference = weakref.ref(variable)

        def move(parameter: Tensor) -> None:
            variable = reference()
            assert variable is not None
            with WithoutSubclass():
                grad = local_grad(parameter)
                set_local_grad(parameter, None)
            r = variable.forward_param() or 0
            copy = variable.copies[r]
            grad = None if grad is None else grad.to(copy.device)
            set_local_grad(copy, add_grads(local_grad(copy), grad))
            self.unreduced.pending[r].append(copy)

        with WithoutSubclass():
            register: Callable[..., object] = Tensor.register_post_accumulate_grad_hook
            register(parameter, move)


def _reduce_after_backward(reference: weakref.ref[GradAccess], copy: ReplicaParameter) -> None:
    """Reduces the gradients when the current backward pass ends, for the hooks."""
    access = reference()
    if access is not None and copy.variable.hooks:
        # Called several times in a pass; the first callback reduces, the others find nothing.
        queue_callback(access.end_backward)


def _add_idle_replicas(replica: Replica) -> tuple[int, ...]:
    """Returns the replica's index, and the idle replicas if they will follow this one."""
    replica_id, active = replica.replica_id, replica.run.active
    if replica_id != active[0]:
        return (replica_id,)
    return (replica_id, *(r for r in range(replica.replicas.num_replicas) if r not in active))


def _is_same_memory(a: Tensor, b: Tensor | None) -> bool:
    """Whether writing to one gradient changes the other."""
    if b is None or a is b:
        return a is b
    return a.layout is b.layout is torch.strided and share_storage(a, b)


def _have_equal_values(some: Tensor | None, other: Tensor | None) -> bool:
    if some is None or other is None:
        return some is other
    if some is other or some.is_sparse or other.is_sparse:
        return True
    return have_equal_numbers(other.nan_to_num(), some.nan_to_num())
