"""Reduced gradients that the cross-replica context has read: it may change them afterwards.

    FirstReplicaGrads   the program sees the first replica's gradients themselves
    HomeGrads           the program sees copies on the parameter device, as ``p`` is there

In both a change of the program reaches all replicas before they next run. Below, *exposed* is a
gradient that the program has read or set.

A copy on the parameter device is made at the first read, and stays the same object as long as it
is the same gradient. In the other direction it follows what the replicas add. An optimizer step
needs every gradient on the parameter device: the copies that the program has not read are dropped
after the step.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from mirror.execution.lifecycle import do_nothing
from mirror.replica.params.mirrored_tensor import same_kind
from mirror.replica.params.replicated_param import ReplicatedParam


class ExposedGrads(Protocol):
    """The gradients that the program has.

    Attributes:
        grads: what is known of each exposed gradient; always the same dict.
    """

    grads: dict[ReplicatedParam, Any]

    def show(self, variable: ReplicatedParam) -> Tensor | None:
        """Returns the present gradient, which is exposed from now on."""

    def put(self, variable: ReplicatedParam, value: Tensor | None) -> Tensor | None:
        """Exposes the gradient that the program sets; returns the first replica's."""

    def find(self, variable: ReplicatedParam) -> Tensor | None:
        """Returns the gradient if it is exposed."""

    def sync(self) -> None:
        """Copies the exposed gradients to all replicas, before they run."""

    def before_reduction(self) -> None:
        """Is called before a reduction in the cross-replica context."""

    def refresh(self) -> None:
        """Is called after it, and where the replicas have become equal."""

    def drop(self, variable: ReplicatedParam) -> None:
        """Drops what is known of a gradient; takes no lock."""

    def replace(self, variable: ReplicatedParam, known: Tensor, grad: Tensor) -> None:
        """Records that another object has replaced the first replica's gradient."""


class FirstReplicaGrads:
    """The program sees the first replica's gradients; see ``ExposedGrads``."""

    before_reduction = refresh = staticmethod(do_nothing)

    def __init__(self) -> None:
        self.grads: dict[ReplicatedParam, Tensor] = {}

    def show(self, variable: ReplicatedParam) -> Tensor | None:
        grad = variable.targets[0].grad
        if grad is not None:
            self.grads[variable] = copy_without_bucket(grad)
        return grad

    def put(self, variable: ReplicatedParam, value: Tensor | None) -> Tensor | None:
        self.grads.pop(variable, None)
        if value is not None:
            self.grads[variable] = value
        return value

    def find(self, variable: ReplicatedParam) -> Tensor | None:
        return self.grads.get(variable)

    def sync(self) -> None:
        for variable, grad in list(self.grads.items()):
            if variable.targets[0].grad is grad:
                broadcast_grad(variable)
            else:
                del self.grads[variable]

    def drop(self, variable: ReplicatedParam) -> None:
        self.grads.pop(variable, None)

    def replace(self, variable: ReplicatedParam, known: Tensor, grad: Tensor) -> None:
        if self.grads.get(variable) is known:
            self.grads[variable] = grad


@dataclass(slots=True)
class _HomeGrad:
    """An exposed gradient on the parameter device.

    Attributes:
        grad: the gradient there.
        source: the first replica's gradient, from which it was copied.
        version: the version of ``source`` when both were last equal.
    """

    grad: Tensor
    source: Tensor
    version: int


class HomeGrads:
    """The program sees copies on the parameter device; see ``ExposedGrads``."""

    def __init__(self) -> None:
        self.grads: dict[ReplicatedParam, _HomeGrad] = {}

    def fetch(self, variable: ReplicatedParam, source: int = 0) -> Tensor | None:
        """Returns a replica's gradient on the parameter device, copied if it is not there yet."""
        home, grad = variable.home, variable.targets[source].grad
        known = self.grads.get(variable)
        if grad is not None and known is not None and known.source is grad:
            if known.version != grad._version:
                if same_kind(known.grad, grad) and not grad.requires_grad:
                    known.grad.data.copy_(grad)
                else:
                    known.grad = home.grad = _copy_at(grad, home.device)
                known.version = grad._version
            return known.grad
        self.grads.pop(variable, None)
        home.grad = None if grad is None else _copy_at(grad, home.device)
        return home.grad

    def drop_fetched(self, variables: Iterable[ReplicatedParam]) -> None:
        """Drops the gradients that were fetched for a step only."""
        for variable in variables:
            if variable not in self.grads:
                variable.home.grad = None

    def show(self, variable: ReplicatedParam) -> Tensor | None:
        grad, source = self.fetch(variable), variable.targets[0].grad
        if grad is None or source is None:
            return None
        if variable not in self.grads:
            self.grads[variable] = _HomeGrad(grad, source, source._version)
        return copy_without_bucket(grad)

    def put(self, variable: ReplicatedParam, value: Tensor | None) -> Tensor | None:
        copied = None if value is None else _copy_at(value.detach(), variable.targets[0].device)
        self.drop(variable)
        variable.home.grad = value
        if value is not None and copied is not None:
            self.grads[variable] = _HomeGrad(value, copied, copied._version)
        return copied

    def find(self, variable: ReplicatedParam) -> Tensor | None:
        known = self.grads.get(variable)
        return None if known is None else known.grad

    def sync(self) -> None:
        for variable, known in list(self.grads.items()):
            if variable.targets[0].grad is not known.source:
                self.drop(variable)
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

    def before_reduction(self) -> None:
        self.sync()

    def refresh(self) -> None:
        for variable, known in list(self.grads.items()):
            if variable.targets[0].grad is not known.source:
                self.drop(variable)
            else:
                self.fetch(variable)

    def drop(self, variable: ReplicatedParam) -> None:
        self.grads.pop(variable, None)
        variable.home.grad = None

    def replace(self, variable: ReplicatedParam, known: Tensor, grad: Tensor) -> None:
        """Does nothing: ``fetch`` and ``refresh`` compare the identity of the gradient."""


def broadcast_grad(
    variable: ReplicatedParam, source: int = 0, others: Iterable[int] | None = None
) -> None:
    """Copies one replica's gradient to others; by default the first replica's to all."""
    grad = variable.targets[source].grad
    for r in range(1, len(variable.targets)) if others is None else others:
        target = variable.targets[r]
        if grad is None:
            target.grad = None
        elif target.grad is None or not same_kind(target.grad, grad):
            target.grad = copy_for(grad, target)
        else:
            target.grad.data.copy_(grad.data)


def copy_for(grad: Tensor, target: nn.Parameter) -> Tensor:
    """Returns a copy of a gradient on a target's device."""
    return grad.detach().clone().to(target.device)


def _copy_at(grad: Tensor, device: torch.device) -> Tensor:
    """Returns a copy on a device; it carries the gradient's graph if there is one."""
    with torch.inference_mode(False), torch.set_grad_enabled(grad.requires_grad):
        return grad.clone().to(device)


def copy_without_bucket(grad: Tensor) -> Tensor:
    """Makes copies and pickles of a gradient contain it alone, not its bucket; returns it."""
    if (
        type(grad) is Tensor
        and grad.layout is torch.strided
        and grad.untyped_storage().nbytes() > grad.nbytes
        and "__deepcopy__" not in grad.__dict__
    ):
        # Both pickle and copy.deepcopy look these methods up on the object.
        grad.__deepcopy__ = grad.__reduce_ex__ = _CopyWithoutBucket(grad)  # type: ignore[method-assign]
    return grad


class _CopyWithoutBucket:
    """Stands for both methods of a gradient; bound methods would create a reference cycle."""

    __slots__ = ("_grad",)

    def __init__(self, grad: Tensor) -> None:
        self._grad = weakref.ref(grad)

    def __call__(self, argument: Any) -> Any:
        """Returns the result of ``__deepcopy__`` for a memo, of ``__reduce_ex__`` for a number."""
        grad = self._grad()
        if grad is None:
            raise ReferenceError("the gradient of this copy was freed; keep a clone")
        alone = grad.detach().clone().requires_grad_(grad.requires_grad)
        return alone if isinstance(argument, dict) else alone.__reduce_ex__(argument)
