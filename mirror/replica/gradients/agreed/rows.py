"""Rows: sparse gradients of several workers, summed as sparse ones.

Indices and values travel in an exchange of tensors of any sizes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from mirror.comm.workers.alone import LocalWorkerGroup, Message
from mirror.replica.collectives.reduction import summed
from mirror.replica.copies.variable import ReplicatedParam

_ABSENT, _SPARSE, _DENSE = 0.0, 1.0, 2.0


def sum_sparse(
    workers: LocalWorkerGroup,
    mine: Sequence[Tensor | None],
    variables: Sequence[ReplicatedParam | None],
) -> list[Tensor | None]:
    """Sums gradients over the workers, each sparse, dense or absent; sparse if all are.

    Args:
        variables: whose gradients they are; ``None`` for one that is gone.
    """
    like = [None if variable is None else variable.targets[0] for variable in variables]
    kinds, tensors = [], list[Tensor]()
    for grad in mine:
        if grad is None:
            kinds.append(_ABSENT)
        elif grad.is_sparse:
            kinds.append(_SPARSE)
            grad = grad.coalesce()
            tensors += [grad.indices(), grad.values()]
        else:
            kinds.append(_DENSE)
            tensors.append(grad)
    every = workers.exchange_tensors("sparse gradients", len(mine), tensors, kinds)
    columns = [list(_opened(parcel, like)) for parcel in every]
    totals: list[Tensor | None] = []
    for parts, target in zip(zip(*columns, strict=True), like, strict=True):
        present = [part for part in parts if part is not None]
        if not present or target is None:
            totals.append(None)
            continue
        if not all(part.is_sparse for part in present):
            present = [part.to_dense() if part.is_sparse else part for part in present]
        totals.append(summed(present, target.device))
    return totals


def _opened(parcel: Message, like: Sequence[Tensor | None]) -> Iterator[Tensor | None]:
    """Returns the gradients of one worker."""
    tensors = iter(parcel.tensors)
    for kind, target in zip(parcel.numbers, like, strict=True):
        if kind == _ABSENT:
            yield None
        elif kind == _DENSE:
            yield next(tensors)
        else:
            rows = next(tensors), next(tensors)
            yield (
                None
                if target is None
                else torch.sparse_coo_tensor(*rows, target.shape, check_invariants=False)
            )
