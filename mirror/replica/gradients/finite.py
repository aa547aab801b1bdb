"""Finite: looks for NaN and infinities before gradients are reduced, while it is known whose."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from mirror.errors import GradientError
from mirror.replica.copies.registry import Registry
from mirror.replica.copies.variable import ReplicaParameter
from mirror.replica.gradients.arrivals import local_grad
from mirror.replica.paths import path_of


class Finite:
    """Looks for NaN and infinities in local gradients. It waits for the devices.

    Args:
        names: of the replicas.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def are(self, copies: Sequence[Sequence[ReplicaParameter]]) -> bool:
        """Whether the local gradients of each replica's copies are finite."""
        return all(_are_finite(map(local_grad, mine)) for mine in copies)

    def refuse(self, copies: Sequence[Sequence[ReplicaParameter]]) -> None:
        """Raises GradientError for the first local gradient that is not."""
        for mine, name in zip(copies, self._names, strict=True):
            if not _are_finite(map(local_grad, mine)):
                for copy in mine:
                    grad = local_grad(copy)
                    if not _are_finite([grad]):
                        variable = copy.variable
                        path = path_of(variable.owner(), variable.name)
                        raise _not_finite(grad, f"{path!r} on {name}")


# The parameters of strategies of one replica. The hook stays, once there is one: to take it off
# while torch goes through the hooks is an error.
_only: weakref.WeakSet[Registry] = weakref.WeakSet()
_installing = threading.Lock()
_hooks: list[Any] = []


def watch_only_replica(registry: Registry) -> None:
    """Looks at the gradients of a strategy's only replica, before each optimizer step."""
    with _installing:
        _only.add(registry)
        if not _hooks:
            _hooks.append(register_optimizer_step_pre_hook(_before_step))


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    registries = tuple(_only)
    parameters = [p for options in optimizer.param_groups for p in options["params"]]
    ours = [p for p in parameters if p.grad is not None and any(r.owns(p) for r in registries)]
    if not _are_finite(p.grad for p in ours):
        for p in ours:
            if not _are_finite([p.grad]):
                raise _not_finite(p.grad, repr(path_of(p, "?")))


def _are_finite(grads: Iterable[Tensor | None]) -> bool:
    dense = [_dense(grad.detach()) for grad in grads if grad is not None and grad.numel()]
    with torch.inference_mode(False), torch.no_grad():
        largest = torch._foreach_norm(dense, torch.inf) if dense else []
        return not largest or bool(torch.stack([m.float() for m in largest]).isfinite().all())


def _dense(grad: Tensor) -> Tensor:
    if grad.is_sparse:
        grad = grad._values()
    return torch.view_as_real(grad) if grad.is_complex() else grad


def _not_finite(grad: Tensor, whose: str) -> GradientError:
    values = _dense(grad.detach())
    num_nan, num_inf = int(values.isnan().sum()), int(values.isinf().sum())
    return GradientError(
        "gradients must be finite, as Guards(finite_gradients=True) asks; that of parameter "
        f"{whose} has {num_nan} NaN and {num_inf} infinities among its {values.numel()} elements; "
        "look for what made them there (torch.autograd.set_detect_anomaly), or leave the guard "
        "off with a GradScaler, which skips such steps"
    )
