"""Finite: looks for NaN and infinities before gradients are reduced, while it is known whose."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from mirror.errors import GradientError
from mirror.replica.params.param_paths import path_of


class NamedParam(Protocol):
    """A parameter that can be named."""

    name: str

    def owner(self) -> Tensor | None: ...


class Owns(Protocol):
    """Knows the parameters of a strategy."""

    def owns(self, tensor: Tensor) -> bool: ...


class NonFiniteCheck:
    """Looks for NaN and infinities in local gradients. It waits for the devices.

    Args:
        names: of the replicas.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def all_finite(self, columns: Sequence[Sequence[Tensor | None]]) -> bool:
        """Whether each replica's gradients are finite."""
        return all(map(_are_finite, columns))

    def raise_error(
        self, columns: Sequence[Sequence[Tensor | None]], variables: Sequence[NamedParam | None]
    ) -> None:
        """Raises GradientError for the first of the variables' gradients that is not."""
        for column, name in zip(columns, self._names, strict=True):
            if not _are_finite(column):
                for grad, variable in zip(column, variables, strict=True):
                    if variable is not None and not _are_finite([grad]):
                        path = path_of(variable.owner(), variable.name)
                        assert grad is not None
                        raise _not_finite(grad, f"{path!r} on {name}")


# Of strategies of one replica, whose gradients nobody reduces: looked at when a step begins.
only_replicas: list[weakref.ref[Owns]] = []


def watch_only_replica(registry: Owns) -> None:
    """Has the gradients of a strategy's only replica looked at before each optimizer step."""
    only_replicas.append(weakref.ref(registry, only_replicas.remove))


def stop_watching(registry: Owns) -> None:
    """Ends what ``watch_only_replica`` began."""
    only_replicas[:] = [known for known in only_replicas if known() is not registry]


def refuse_step(optimizer: Optimizer) -> None:
    """Raises GradientError for a gradient of such a replica that is not finite."""
    registries = [registry for known in only_replicas if (registry := known()) is not None]
    parameters = [p for options in optimizer.param_groups for p in options["params"]]
    ours = [p for p in parameters if p.grad is not None and any(r.owns(p) for r in registries)]
    if not _are_finite([p.grad for p in ours]):
        for p in ours:
            if not _are_finite([p.grad]):
                raise _not_finite(p.grad, repr(path_of(p, "?")))


def _are_finite(grads: Iterable[Tensor | None]) -> bool:
    dense = [_dense(grad.detach()) for grad in grads if grad is not None and grad.numel()]
    with torch.inference_mode(False), torch.no_grad():
        # On the CPU a sum is 30 times as fast as the largest element. That of finite elements may
        # have no end, too: then it says nothing.
        if dense and dense[0].device.type == "cpu":
            sums = [g.sum(dtype=torch.promote_types(g.dtype, torch.float32)) for g in dense]
            if _all_finite(sums):
                return True
        return not dense or _all_finite(torch._foreach_norm(dense, torch.inf))


def _all_finite(values: Iterable[Tensor]) -> bool:
    alike: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}  # each in its own range
    for value in values:
        alike.setdefault((value.dtype, value.device), []).append(value)
    return all(bool(torch.stack(mine).isfinite().all()) for mine in alike.values())


def _dense(grad: Tensor) -> Tensor:
    if grad.is_sparse:
        grad = grad._values()
    return torch.view_as_real(grad.resolve_conj()) if grad.is_complex() else grad


def _not_finite(grad: Tensor, whose: str) -> GradientError:
    values = _dense(grad.detach())
    num_nan, num_inf = int(values.isnan().sum()), int(values.isinf().sum())
    return GradientError(
        "gradients must be finite, as Guards(finite_gradients=True) asks; that of parameter "
        f"{whose} has {num_nan} NaN and {num_inf} infinities among its {values.numel()} elements; "
        "look for what made them there (torch.autograd.set_detect_anomaly), or leave the guard "
        "off with a GradScaler, which skips such steps"
    )
