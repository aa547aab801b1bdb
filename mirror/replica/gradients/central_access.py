"""CentralAccess: the reduced gradients that the cross-replica context sees, at home.

[Note: Gradients at home]
A reduction leaves the gradient with every replica, on its device. ``p.grad`` in the cross-replica
context is at home, where ``p`` is: a copy, made when somebody looks, and as long as it is the same
gradient the same object. From then on it is carried to all replicas before these next run, or
add to theirs, because it may have been changed; and it follows what the replicas add to theirs.
A step needs every gradient at home: those that nobody has seen are there for its duration alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mirror.execution.lifecycle import LifecycleHooks
from mirror.execution.replicas import Replicas
from mirror.execution.runner import Runner
from mirror.replica.gradients.grad_access import GradAccess, copy_without_bucket
from mirror.replica.gradients.grad_reducer import GradReducer
from mirror.replica.params.replicated_param import ReplicatedParam
from mirror.replica.params.replicated_params import ReplicatedParams
from mirror.replica.params.subclasses import same_kind


@dataclass(slots=True)
class _Shown:
    """What the cross-replica context has seen.

    Attributes:
        grad: home's gradient.
        source: the first replica's, of which it is a copy.
        version: of that, when they were last equal.
    """

    grad: Tensor
    source: Tensor
    version: int


class CentralGradReducer(GradReducer):
    """Gradients of parameters that live at home; it has what changed there carried before."""

    access: CentralAccess

    def _prepare(self) -> None:
        if not self._shown and not self.have_arrived():
            return
        self.access.carry_shown()
        super()._prepare()
        self.access.refresh()

    def flush(self) -> None:
        """Reduces what backward passes in the cross-replica context left pending."""
        if self.have_arrived() or self.deferred:
            self.access.carry_shown()
            self.reduce(self.equal_shares())
            self.access.refresh()


class CentralAccess(GradAccess):
    """The reduced gradients of parameters that live at home. See [Note: Gradients at home]."""

    def __init__(self, replicas: Replicas, runner: Runner, gradients: CentralGradReducer) -> None:
        super().__init__(replicas, runner, gradients)
        self._seen: dict[ReplicatedParam, _Shown] = {}
        gradients.access = self

    def part(self, variables: ReplicatedParams) -> LifecycleHooks:
        """Returns what keeps the reduced gradients of ``variables`` equal, as values are now."""
        others = super().part(variables)

        def recover() -> None:
            others.recover()
            self.refresh()

        return LifecycleHooks(
            name=others.name,
            prepare=self.carry_shown,
            sync_idle=others.sync_idle,
            on_synced=self.refresh,
            recover=recover,
        )

    # Between home and the replicas

    def fetch(self, variable: ReplicatedParam, source: int = 0) -> Tensor | None:
        """Gives home a replica's gradient, unless it has it, and returns it."""
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
            self._seen[variable] = _Shown(grad, source, source._version)
        return copy_without_bucket(grad)

    def carry_shown(self) -> None:
        """Gives all replicas what the cross-replica context has seen, and may have changed."""
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
        """Has home follow what the replicas have done to gradients that have been seen there."""
        for variable, known in list(self._seen.items()):
            if variable.targets[0].grad is not known.source:
                self._forget_shown(variable)
            else:
                self.fetch(variable)

    def drop_unseen(self, variables: Iterable[ReplicatedParam]) -> None:
        """Drops the gradients at home that only a step needed."""
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
        everybody = range(len(variable.targets))
        copied = None if value is None else _copy_at(value.detach(), variable.targets[0].device)
        self._put(variable, copied, 0, everybody)
        self._seen.pop(variable, None)
        variable.home.grad = value
        if value is not None and copied is not None:
            self._seen[variable] = _Shown(value, copied, copied._version)

    def clear(
        self, variables: Sequence[ReplicatedParam], targets: Sequence[Sequence[nn.Parameter]]
    ) -> bool:
        """Drops reduced gradients, as ``Access.clear``, and home's with them."""
        if not super().clear(variables, targets):
            return False
        if self._runner.running is None:
            for variable in variables:
                self._forget_shown(variable)
        return True

    def replaced(self, variable: ReplicatedParam, known: Tensor, grad: Tensor) -> None:
        """Notes nothing: that the gradient is another one is seen at the next look."""

    def forget(self, variable: ReplicatedParam) -> None:
        """Drops what there is of a variable that is gone; takes no lock."""
        self._seen.pop(variable, None)
        super().forget(variable)


def _copy_at(grad: Tensor, device: torch.device) -> Tensor:
    """Returns a copy on a device, with the gradient's graph if it has one."""
    with torch.inference_mode(False), torch.set_grad_enabled(grad.requires_grad):
        return grad.clone().to(device)
