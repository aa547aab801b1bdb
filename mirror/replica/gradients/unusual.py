"""Gradients that are no dense tensors to sum: sparse, complex, carrying a graph, or absent."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mirror.replica.collectives.reduction import summed
from mirror.replica.copies.hooks import through_hooks
from mirror.replica.copies.variable import ReplicatedParam
from mirror.replica.gradients.arrivals import accumulate_one


def or_zeros(grad: Tensor | None, variable: ReplicatedParam, replica_id: int) -> Tensor:
    """Returns a replica's gradient, or what it counts for where there is none."""
    if grad is None:
        return torch.zeros_like(variable.targets[replica_id])
    return grad


def are_non_dense(grads: Sequence[Tensor | None]) -> bool:
    """Whether any of one variable's gradients is none that a communicator takes."""
    return any(g is not None and (g.is_sparse or g.requires_grad or g.is_complex()) for g in grads)


def reduce_non_dense(
    variable: ReplicatedParam, grads: Sequence[Tensor | None], scale: float
) -> None:
    """Reduces sparse gradients, as sparse, and those that carry a graph, keeping it."""
    present = [grad for grad in grads if grad is not None]
    if not all(grad.is_sparse for grad in present):
        present = [grad.to_dense() if grad.is_sparse else grad for grad in present]
    with torch.set_grad_enabled(any(grad.requires_grad for grad in present)):
        total = summed(present, variable.targets[0].device)
        if scale != 1.0:
            total = total * scale
            total = total.coalesce() if total.is_sparse else total
        total = through_hooks(variable.hooks, total)
        for r, target in enumerate(variable.targets):
            mine = total if r == 0 else total.clone().to(target.device)
            accumulate_one(target, mine)
