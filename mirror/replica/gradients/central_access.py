"""Gradients on the parameter device: ``p.grad`` in the cross-replica context.

A reduction leaves the reduced gradient with every replica, on its device. The parameter ``p`` is
on the parameter device, so ``p.grad`` is a copy there. It is made at the first read, and stays the
same object as long as it is the same gradient. From then on the program may change the copy, so it
is broadcast to all replicas before they next run or add to their gradients. In the other direction
it follows what the replicas add. An optimizer step needs every gradient on the parameter device:
the copies that the program has not read are dropped after the step.
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
        """Copies a replica's gradient to the parameter device if it is not there; returns it."""
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
        """Updates the gradients that the program has read to what the replicas now have."""
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

    def replaced(self, variable: ReplicatedParam, known: Tensor, grad: Tensor) -> None:
        """Does nothing: ``fetch`` and ``refresh`` compare the identity of the gradient."""

    def forget(self, variable: ReplicatedParam) -> None:
        """Drops the state of a variable that was freed; takes no lock."""
        self._seen.pop(variable, None)
        super().forget(variable)


def _copy_at(grad: Tensor, device: torch.device) -> Tensor:
    """Returns a copy on a device; it carries the gradient's graph if there is one."""
    with torch.inference_mode(False), torch.set_grad_enabled(grad.requires_grad):
        return grad.clone().to(device)
