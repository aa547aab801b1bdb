"""A replica's summand of the whole batch's loss: the functions of ``tf.nn`` for losses."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor

from mirror.errors import StrategyError, short_repr
from mirror.execution.run import current
from mirror.threads.merge_point import MergePoint


def compute_average_loss(
    per_example_loss: Tensor,
    sample_weight: Tensor | float | None = None,
    global_batch_size: int | None = None,
) -> Tensor:
    """Returns this replica's sum of losses over the number of examples of the whole batch.

    The sum over the replicas is the loss of the whole batch: for ``gradient_reduction="sum"``, or
    for ``strategy.reduce("sum", losses).backward()`` outside ``run``. (Under the default
    ``"mean"``, a backward pass inside ``run`` starts from the plain mean over the replica's part.)

    Args:
        per_example_loss: the losses, of shape ``(N, ...)``; summed over all dimensions, averaged
            over the first.
        sample_weight: a number, or a tensor with the shape of the loss, with its leading
            dimensions, or with one more dimension of size 1. Does not change the number of
            examples.
        global_batch_size: the number of examples of the whole batch. By default the replicas add
            up their numbers at a merge point, on the host: no device communicates or waits.

    Raises:
        ValueError: the loss is 0-d, ``sample_weight`` does not fit it, or ``global_batch_size``
            is not positive or not a scalar.
        TypeError: ``global_batch_size`` is not an integer.
        StrategyError: it is called without ``global_batch_size`` in the cross-replica context.
        DivergenceError: not all replicas call it without ``global_batch_size``.
    """
    losses = torch.as_tensor(per_example_loss)
    if losses.dim() == 0:
        raise ValueError(
            "per_example_loss needs one loss per example, a tensor of one dimension or more, got "
            "a 0-d one; compute the loss with reduction='none'"
        )
    dtype = losses.dtype
    num_examples = losses.shape[0]
    if sample_weight is not None:
        losses = (losses * _fit_weight(sample_weight, losses)).to(dtype)
    if global_batch_size is None:
        _check_context("compute_average_loss without a global_batch_size")
        replica = current.replica
        if replica is not None and replica.tracing is not None:
            number = torch.scalar_tensor(num_examples, dtype=torch.float64, device=losses.device)
            (count,) = replica.tracing.all_reduce("sum", [number])
            return (losses.sum() / count.clamp(min=1)).to(dtype)
        total = _sum_over_replicas("compute_average_loss", num_examples)
    else:
        total = _check_batch_size(global_batch_size)
    # An empty batch has no losses, and no examples to divide them by.
    return losses.sum() / max(1, total)


def scale_regularization_loss(regularization_loss: Tensor) -> Tensor:
    """Returns the sum of a loss that is equal on all replicas, divided by their number.

    The sum over the participating replicas is then that loss, once. With several workers all
    replicas must call it.

    Raises:
        StrategyError: it is called in the cross-replica context.
    """
    _check_context("scale_regularization_loss")
    replica = current.replica
    if replica is not None and replica.tracing is not None:
        loss = torch.as_tensor(regularization_loss).sum()
        return (loss / replica.tracing.count).to(loss.dtype)
    num_replicas = 1 if replica is None else len(replica.run.active)
    if replica is not None and replica.replicas.workers.is_multi_process:
        num_replicas = _sum_over_replicas(
            "scale_regularization_loss", 1
        )  # other workers may have idle replicas
    return torch.as_tensor(regularization_loss).sum() / num_replicas


def _sum_over_replicas(what: str, number: int) -> int:
    """Returns the sum over the participating replicas of all workers."""
    replica = current.replica
    if replica is None:
        return number
    workers = replica.replicas.workers

    def action(payloads: dict[int, int]) -> dict[int, int]:
        own = sum(payloads.values())
        numbers = workers.exchange(what, None, lambda: b"%d" % own)
        return dict.fromkeys(payloads, sum(map(int, numbers)))

    point = MergePoint(what, (), number, action)
    total: int = replica.run.merge(replica.replica_id, point)
    return total


def _check_context(what: str) -> None:
    if current.strategy is not None and current.replica is None:
        raise StrategyError(
            f"{what} was called in the cross-replica context; call it in the function that "
            "strategy.run runs, where each replica has its own part of the batch"
        )


def _fit_weight(sample_weight: Tensor | float, losses: Tensor) -> Tensor:
    """Returns the weights in a shape that broadcasts to the losses' shape."""
    given = torch.as_tensor(sample_weight, device=losses.device)
    weight = given
    if weight.dim() == losses.dim() + 1 and weight.shape[-1] == 1:
        weight = weight.squeeze(-1)
    while 0 < weight.dim() < losses.dim():
        weight = weight.unsqueeze(-1)
    fits = weight.dim() in (0, losses.dim()) and all(
        size in (1, wanted) for size, wanted in zip(weight.shape, losses.shape, strict=False)
    )
    if not fits:
        raise ValueError(
            f"sample_weight of shape {tuple(given.shape)} does not fit losses of shape "
            f"{tuple(losses.shape)}; give one weight per example, or one per loss"
        )
    return weight


def _check_batch_size(global_batch_size: Any) -> int:
    if isinstance(global_batch_size, Tensor) and global_batch_size.dim():
        raise ValueError(
            f"global_batch_size must be a scalar, got {short_repr(global_batch_size)}"
        )
    try:
        if isinstance(global_batch_size, bool):
            raise TypeError
        size = operator.index(global_batch_size)
    except TypeError:
        raise TypeError(
            f"global_batch_size must be an integer, got {short_repr(global_batch_size)}"
        ) from None
    if not 0 < size < 2**63:
        raise ValueError(f"global_batch_size must be positive, and an int of 64 bits; got {size}")
    return size
