"""Access: reading, setting and carrying the gradients that users see, ``p.grad``.

Views: gradients that lie in one buffer with others, and are copied without them.

[Note: Gradients in flat buffers]
Where a backend packs, gradients are moved into flat buffers, are reduced there, and stay there:
``p.grad`` is a view of a buffer, with the strides of the gradient that autograd brought. Nothing
is copied back. The factor of a mean goes with the sum; only NCCL multiplies afterwards.

    moved           where several gradients share a pack of ``bytes_per_pack``
    left in place   a gradient alone in its pack, one with gaps, or whose strides differ between
                    replicas; all of them by "host", which packs nothing
    copied back     with a ``wire_dtype``: the way back is a cast, which writes every byte anyway

To autograd it is no view, but a tensor with a version of its own. Every reduction makes new
buffers, so what somebody has kept of an earlier one is never written to; a ``.grad`` that is there
already is added to. A buffer lives as long as any gradient in it: who keeps one keeps at most
``bytes_per_pack``. A copy or a file would have all of it, too, as torch takes whole storages; so
gradients that leave in the cross-replica context have a say in how they are copied.

On GPUs a buffer belongs to the stream on which it was made, which is one of computation. The
streams of passes, from whose memory gradients were moved and on which they may be used next, are
noted (``Watch.streams``), and the allocator is told of them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from mirror.base.dynamo import disable_dynamo
from mirror.base.torch_private import WithoutSubclass, compile_context, queue_callback
from mirror.errors import StrategyError
from mirror.execution.current_replica import replica_of
from mirror.execution.lifecycle import LifecycleHooks
from mirror.execution.replicas import Replica, Replicas, RunView
from mirror.execution.runner import Runner
from mirror.replica.gradients.grad_reducer import GradReducer
from mirror.replica.gradients.ready_grads import local_grad, plus, set_local_grad
from mirror.replica.params.gradient_hooks import GradientHook
from mirror.replica.params.mirrored_tensor import share_storage
from mirror.replica.params.replicated_param import ReplicaParameter, ReplicatedParam
from mirror.replica.params.replicated_params import ReplicatedParams
from mirror.replica.params.subclasses import same_kind

_LOOKS = 64  # at gradients on GPUs


class GradAccess:
    """The reduced gradients of mirrored parameters, which are reduced when they are looked at.

    Attributes:
        unreduced: the gradients that are not reduced yet.
        handed_out: gradients that the cross-replica context has seen, so may have changed.
    """

    def __init__(self, replicas: Replicas, runner: Runner, gradients: GradReducer) -> None:
        self._replicas, self._runner = replicas, runner
        self.unreduced = gradients
        self.handed_out: dict[ReplicatedParam, Tensor] = {}
        self._left: dict[ReplicatedParam, Tensor | None] = {}
        self._assigned: dict[
            ReplicatedParam, None
        ] = {}  # whose gradients replicas have set in a run
        self._looks = _LOOKS

    def part(self, variables: ReplicatedParams) -> LifecycleHooks:
        """Returns what keeps the reduced gradients of ``variables`` equal, as values are now."""

        def bring_along(source: int, idle: Sequence[int]) -> None:
            for variable in variables:
                self.broadcast(variable, source, idle)

        def recover() -> None:
            for variable in variables:
                self.broadcast(variable)

        return LifecycleHooks(
            name="reduced gradients",
            prepare=self._carry_handed_out,
            sync_idle=bring_along,
            recover=recover,
        )

    def leave_grads(self, grads: dict[ReplicatedParam, Tensor | None]) -> None:
        """Takes gradients as what all replicas have; they get them when somebody looks."""
        self._left = self._left | grads

    def take_left(self) -> None:
        """Gives the replicas the gradients that were left."""
        left, self._left = self._left, {}
        for variable, grad in left.items():
            for r, target in enumerate(variable.targets):
                target.grad = grad if grad is None or r == 0 else _copy_for(grad, target)

    # Reading and setting

    @disable_dynamo
    def read(self, variable: ReplicatedParam, replica_id: int | None) -> Tensor | None:
        """Returns the gradient that one replica's code, or the cross-replica context, sees."""
        here, gradients = replica_of(self._replicas), self.unreduced
        if here is None or replica_id is None:
            return self._read_outside(variable)
        if gradients.deferring:
            return gradients.local(variable, replica_id)
        # A compiler that traces a replica's code looks at .grad with its lock held, for which the
        # others would wait: it must not wait for them.
        if gradients.awaited(here.replica_id) and compile_context() is None:
            gradients.observe(here)
        return variable.targets[replica_id].grad

    def _read_outside(self, variable: ReplicatedParam) -> Tensor | None:
        """Returns the reduced gradient in the cross-replica context, and notes that it left."""
        self._runner.check_between_runs("a gradient")
        if self._left:
            self.take_left()
        self.unreduced.flush()
        grad = variable.targets[0].grad
        if grad is not None:
            self.handed_out[variable] = copy_without_bucket(grad)
        return grad

    @disable_dynamo
    def write(self, variable: ReplicatedParam, value: Tensor | None) -> None:
        """Sets the gradient of the current replica; of all in the cross-replica context."""
        replica = replica_of(self._replicas)
        if replica is None:
            self._write_outside(variable, value)
            return
        here, gradients = replica.replica_id, self.unreduced
        if value is not None:
            value = _own(variable, value, here)
            self._assigned[variable] = None
        waits = gradients.pending[here] or gradients.unsettled[here] or gradients.deferred
        if not waits:  # in every zero_grad
            variable.targets[here].grad = value
            set_local_grad(variable.copies[here], None)
            return
        self._put(variable, value, here, _followers(replica))

    def _write_outside(self, variable: ReplicatedParam, value: Tensor | None) -> None:
        self._runner.check_between_runs("a gradient")
        if self._left:
            self.take_left()
        self._put(variable, value, 0, range(len(variable.copies)))
        self.handed_out.pop(variable, None)
        if value is not None:
            self.handed_out[variable] = value

    def _put(
        self, variable: ReplicatedParam, value: Tensor | None, home: int, replicas: Sequence[int]
    ) -> None:
        """Gives a replica ``value``, others copies of it, and drops what is not reduced."""
        for r in replicas:
            target = variable.targets[r]
            target.grad = value if value is None or r == home else _copy_for(value, target)
            set_local_grad(variable.copies[r], None)
        self.unreduced.drop(variable, replicas)

    def clear(
        self, variables: Sequence[ReplicatedParam], targets: Sequence[Sequence[nn.Parameter]]
    ) -> bool:
        """Drops reduced gradients, if nothing is pending or deferred; returns whether it did.

        Those of the current replica; of all in the cross-replica context.

        Args:
            targets: per replica, the ordinary parameters of ``variables``.
        """
        replica, gradients = replica_of(self._replicas), self.unreduced
        if replica is not None:
            if gradients.awaited(replica.replica_id):
                return False
            targets = [targets[replica.replica_id]]
        else:
            self._runner.check_between_runs("a gradient")
            if self._left:
                self.take_left()
            if gradients.have_arrived() or gradients.deferred:
                return False
            if self.handed_out:
                for variable in variables:
                    self.handed_out.pop(variable, None)
        for mine in targets:
            for target in mine:
                target.grad = None
        return True

    # Keeping them equal

    def refuse_unlike(self, run: RunView) -> None:
        """Refuses gradients that the replicas of a run have set differently, before a step.

        Raises:
            StrategyError: the step would take the first replica's for all, or part them.
        """
        assigned, self._assigned = self._assigned, {}
        for variable in assigned:
            if variable.devices[0].type != "cpu":  # which would be waited for
                self._looks -= 1
                if self._looks < 0:
                    return
            grads = [variable.targets[r].grad for r in run.active]
            if not all(_have_equal_values(grad, grads[0]) for grad in grads):
                raise StrategyError(
                    f"the replicas have set the gradient of parameter {variable.name!r} each to "
                    "its own value; a gradient that is set inside run is taken as it is, and must "
                    "be the same on all replicas before optimizer.step: all_reduce it with "
                    "mirror.get_replica_context().all_reduce('mean', gradient) (with 'sum' of "
                    "weighted ones for parts of unlike size), or set it outside run"
                )

    def broadcast(
        self, variable: ReplicatedParam, source: int = 0, others: Iterable[int] | None = None
    ) -> None:
        """Gives one replica's gradient to others: the first one's to all."""
        grad = variable.targets[source].grad
        for r in range(1, len(variable.targets)) if others is None else others:
            target = variable.targets[r]
            if grad is None:
                target.grad = None
            elif target.grad is None or not same_kind(target.grad, grad):
                target.grad = _copy_for(grad, target)
            else:
                target.grad.data.copy_(grad.data)

    def _carry_handed_out(self) -> None:
        if self._left:
            self.take_left()
        if not self.handed_out:
            return
        for variable, grad in list(self.handed_out.items()):
            if variable.targets[0].grad is grad:
                self.broadcast(variable)
            else:
                del self.handed_out[variable]

    def replaced(self, variable: ReplicatedParam, known: Tensor, grad: Tensor) -> None:
        """Notes that a reduced gradient has been replaced by another object."""
        if self.handed_out.get(variable) is known:
            self.handed_out[variable] = grad

    def forget(self, variable: ReplicatedParam) -> None:
        """Drops what there is of a variable that is gone; takes no lock."""
        self.handed_out.pop(variable, None)
        self._assigned.pop(variable, None)
        self.unreduced.forget(variable)

    # Seeing them arrive

    def watch(self, copy: ReplicaParameter) -> None:
        """Has the arrival of local gradients noted, once the copy requires any."""
        self.unreduced.watch.changes += 1
        if not copy.requires_grad:
            return
        self.unreduced.watch.add(copy)
        if copy.variable.hooks and not copy.ends_passes:
            copy.ends_passes = True
            copy.watch(self._reduce_after_backward)

    def add_hook(self, variable: ReplicatedParam, hook: GradientHook) -> RemovableHandle:
        """Has ``hook`` called with the reduced gradient of every backward pass from now on."""
        self._runner.check_between_runs("a hook of a gradient")
        self.unreduced.flush()
        handle = RemovableHandle(variable.hooks)
        variable.hooks[handle.id] = hook
        for copy in variable.copies:
            self.watch(copy)
        return handle

    def _reduce_after_backward(self, copy: ReplicaParameter) -> None:
        """Has gradients reduced at the end of a backward pass that a hook waits for."""
        if copy.variable.hooks:
            # Called several times in a pass; the first call leaves nothing to do for the others.
            queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        replica, gradients = replica_of(self._replicas), self.unreduced
        gradients.watch.find(None if replica is None else replica.replica_id)
        if replica is None:
            gradients.flush()
        elif gradients.awaited(replica.replica_id):
            gradients.observe(replica)

    def receive(self, variable: ReplicatedParam, parameter: Tensor) -> None:
        """Takes what arrives at the parameter object itself. See [Note: Past resolution]."""
        if "_is_received" in parameter.__dict__:
            return
        parameter.__dict__["_is_received"] = True
        whose = weakref.ref(variable)  # which may hold the parameter, and no hook is seen by gc

        def arrived(parameter: Tensor) -> None:
            variable = whose()
            assert variable is not None
            with WithoutSubclass():
                grad = local_grad(parameter)
                set_local_grad(parameter, None)
            here = variable.forward_param() or 0
            copy = variable.copies[here]
            grad = None if grad is None else grad.to(copy.device)
            set_local_grad(copy, plus(local_grad(copy), grad))
            self.unreduced.pending[here].append(copy)

        with WithoutSubclass():
            register: Callable[..., object] = Tensor.register_post_accumulate_grad_hook
            register(parameter, arrived)


def _followers(replica: Replica) -> tuple[int, ...]:
    """Returns a replica and those that sit its run out, if it is the one they will follow."""
    here, active = replica.replica_id, replica.run.active
    if here != active[0]:
        return (here,)
    return (here, *(r for r in range(replica.replicas.num_replicas) if r not in active))


def _own(variable: ReplicatedParam, value: Tensor, here: int) -> Tensor:
    """Returns a gradient that no other replica has: one given to all must be N tensors."""
    others = (target.grad for r, target in enumerate(variable.targets) if r != here)
    return value.clone() if any(_are_one(value, grad) for grad in others) else value


def _copy_for(grad: Tensor, target: nn.Parameter) -> Tensor:
    return grad.detach().clone().to(target.device)


def _are_one(a: Tensor, b: Tensor | None) -> bool:
    """Whether a change of one gradient changes another."""
    if b is None or a is b:
        return a is b
    return a.layout is b.layout is torch.strided and share_storage(a, b)


def _have_equal_values(some: Tensor | None, other: Tensor | None) -> bool:
    if some is None or other is None:
        return some is other
    if some is other or some.is_sparse or other.is_sparse:
        return True
    if some.shape != other.shape:
        return False
    return torch.equal(some.nan_to_num(), other.to(some.device).nan_to_num())


def copy_without_bucket(grad: Tensor) -> Tensor:
    """Has a gradient copied and pickled without what else lies in its storage; returns it."""
    if (
        type(grad) is Tensor
        and grad.layout is torch.strided
        and grad.untyped_storage().nbytes() > grad.nbytes
        and "__deepcopy__" not in grad.__dict__
    ):
        # Both pickle and copy.deepcopy ask the object itself.
        grad.__deepcopy__ = grad.__reduce_ex__ = _CopyWithoutBucket(grad)  # type: ignore[method-assign]
    return grad


class _CopyWithoutBucket:
    """Stands for two methods of a tensor, without which it would be on a circle."""

    __slots__ = ("_grad",)

    def __init__(self, grad: Tensor) -> None:
        self._grad = weakref.ref(grad)

    def __call__(self, how: Any) -> Any:
        """Returns what ``__deepcopy__`` does for a memo, and ``__reduce_ex__`` for a protocol."""
        grad = self._grad()
        if grad is None:
            raise ReferenceError("a gradient is gone that this is a copy of; clone gradients")
        alone = grad.detach().clone().requires_grad_(grad.requires_grad)
        return alone if isinstance(how, dict) else alone.__reduce_ex__(how)
